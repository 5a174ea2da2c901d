// What is known of the drafter's work: estimates.py, drift.py and outlook.py in C. Part of planning.c, which says why.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "ranking.h"

// A probability, NaN as 0.
static double clean(double x) { return x > 0.0 ? (x < 1.0 ? x : 1.0) : 0.0; }

// estimates.py, rates, and the survivals of them that end at caps. shared, counts: trials, then hits, [2][C][W] and [2][S][W];
// the last of the C classes is everyone.
void dspark_rates(const double *shared, const double *counts, const int64_t *class_of, int64_t num_classes, int64_t num_slots,
                  int64_t W, double prior, double class_prior, const int64_t *slots, const int64_t *caps, int64_t R,
                  double *rates, double *usual)
{
    const double *shared_hits = shared + num_classes * W, *hits = counts + num_slots * W;
    const double *all_trials = shared + (num_classes - 1) * W, *all_hits = shared_hits + (num_classes - 1) * W;
    double *alike = malloc(num_classes * W * sizeof *alike);
    for (int64_t k = 0; k < W; k++) {
        double everyone = (all_hits[k] + prior) / (all_trials[k] + prior);
        for (int64_t i = k; i < num_classes * W; i += W)
            alike[i] = (shared_hits[i] + class_prior * everyone) / (shared[i] + class_prior);
    }
    for (int64_t r = 0; r < R; r++) {
        const int64_t row = slots[r] * W;
        const double *own = alike + class_of[slots[r]] * W;
        double survival = 1.0;
        for (int64_t k = 0; k < W; k++) {
            double rate = (hits[row + k] + prior * own[k]) / (counts[row + k] + prior);
            rates[r * W + k] = rate;
            survival = k < caps[r] ? survival * clean(rate) : 0.0;
            usual[r * W + k] = survival;
        }
    }
    free(alike);
}

// drift.py, correct. odds [G][W]: by how much a confidence's odds are multiplied; confidence [R][w], w at most W.
void dspark_correct(const double *confidence, const double *odds, int64_t W, const int64_t *groups, int64_t R, int64_t w,
                    double eps, double *corrected)
{
    for (int64_t r = 0; r < R; r++) {
        for (int64_t k = 0; k < w; k++) {
            double c = confidence[r * w + k];
            corrected[r * w + k] = c;
            if (!(c > 0.0 && c < 1.0)) continue;
            c = c < eps ? eps : c > 1.0 - eps ? 1.0 - eps : c;
            const double told = c / (1.0 - c) * odds[groups[r] * W + k];
            corrected[r * w + k] = told / (1.0 + told);
        }
    }
}

static int64_t place_of(int64_t step, int64_t depth) { return (step % depth + depth) % depth; }

// outlook.py, remember. survival [R][w].
void dspark_remember(float *rows, int64_t *steps, int64_t depth, int64_t W, const int64_t *slots, int64_t R, int64_t step,
                     const double *survival, int64_t w)
{
    const int64_t place = place_of(step, depth);
    for (int64_t r = 0; r < R; r++) {
        float *row = rows + (slots[r] * depth + place) * W;
        for (int64_t k = 0; k < W; k++) row[k] = k < w && survival[r * w + k] > 0.0 ? (float)survival[r * w + k] : 0.0f;
        steps[slots[r] * depth + place] = step;
    }
}

// outlook.py, profile. rows float [S][depth][W], steps [S][depth], otherwise [R][w].
void dspark_profile(const float *rows, const int64_t *steps, int64_t depth, int64_t W, int64_t lag, const int64_t *slots,
                    int64_t R, int64_t step, const int64_t *caps, int64_t w, const double *otherwise, int64_t num_samples,
                    double *profile)
{
    const int64_t n = R * w;
    float *samples = malloc((num_samples + 1) * (n + 1) * sizeof *samples);
    for (int64_t r = 0; r < R; r++) {
        const int64_t *stamps = steps + slots[r] * depth;
        int64_t found = 0;
        for (int64_t back = lag; back < depth && found < num_samples; back++) {
            const int64_t place = place_of(step - back, depth);
            if (stamps[place] > step - lag || stamps[place] <= step - depth) continue;
            const float *row = rows + (slots[r] * depth + place) * W;
            float *to = samples + found++ * n + r * w;
            for (int64_t k = 0; k < w; k++) to[k] = k < caps[r] ? row[k] : 0.0f;
        }
        for (; found < num_samples; found++)
            for (int64_t k = 0; k < w; k++)
                samples[found * n + r * w + k] = k < caps[r] ? (float)otherwise[r * w + k] : 0.0f;
    }
    for (int64_t s = 0; s < num_samples; s++) sort_descending(samples + s * n, samples + num_samples * n, n);
    for (int64_t i = 0; i < n; i++) {
        double sum = 0.0;
        for (int64_t s = 0; s < num_samples; s++) sum += samples[s * n + i];
        profile[i] = sum / num_samples;
    }
    free(samples);
}

// estimates.py, Spread.observe.
void dspark_spread(double *resolved, double *open, int64_t W, const double *usual, const double *survival, const int64_t *caps,
                   int64_t R, double memory, double uncertain)
{
    for (int64_t k = 0; k < W; k++) {
        double count = 0.0, apart = 0.0, could = 0.0;
        for (int64_t r = 0; r < R; r++) {
            const double u = usual[r * W + k];
            if (k >= caps[r] || !(fabs(u - 0.5) < 0.5 - uncertain)) continue;
            count += 1.0;
            apart += (survival[r * W + k] - u) * (survival[r * W + k] - u);
            could += u * (1.0 - u);
        }
        if (count == 0.0) continue;
        const double keep = pow(1.0 - 1.0 / memory, count);
        resolved[k] = resolved[k] * keep + apart;
        open[k] = open[k] * keep + could;
    }
}

// estimates.py, observe.
void dspark_learn(double *shared, double *counts, const int64_t *class_of, int64_t num_classes, int64_t num_slots, int64_t W,
                  double round_keep, double memory, const int64_t *slots, int64_t R, const int64_t *drafted,
                  const int64_t *verified, const int64_t *accepted, const double *confidence)
{
    double *hits = counts + num_slots * W, *more = calloc(2 * num_classes * W, sizeof *more);
    const int64_t all = (num_classes - 1) * W, next = num_classes * W;
    for (int64_t r = 0; r < R; r++) {
        const int64_t row = slots[r] * W, own = class_of[slots[r]] * W;
        double reached = 1.0;
        for (int64_t k = 0; k < W; k++) {
            const double c = confidence[r * W + k];
            const int put = k < verified[r], seen = put || (k < drafted[r] && !isnan(c));
            const double outcome = put ? k < accepted[r] : seen ? c : 0.0, trial = seen ? reached : 0.0;
            counts[row + k] = counts[row + k] * round_keep + trial;
            hits[row + k] = hits[row + k] * round_keep + trial * outcome;
            more[own + k] += trial, more[next + own + k] += trial * outcome;
            more[all + k] += trial, more[next + all + k] += trial * outcome;
            reached *= outcome;
        }
    }
    for (int64_t i = 0; i < next; i++) {
        if (more[i] == 0.0) continue;
        const double keep = pow(1.0 - 1.0 / memory, more[i]);
        shared[i] = shared[i] * keep + more[i];
        shared[next + i] = shared[next + i] * keep + more[next + i];
    }
    free(more);
}

// drift.py, observe. sums [4][G][W]: trials, accepted, stated, believed; shift and odds [G][W].
void dspark_drift(double *sums, double *shift, double *odds, int64_t G, int64_t W, const int64_t *groups, int64_t R,
                  const int64_t *verified, const int64_t *accepted, const double *stated, const double *believed, double rate,
                  double full_step, double most)
{
    const int64_t size = G * W;
    double *more = calloc(4 * size, sizeof *more);
    for (int64_t r = 0; r < R; r++) {
        for (int64_t k = 0; k < W && k < verified[r] && k <= accepted[r]; k++) {
            double *sum = more + groups[r] * W + k;
            if (isnan(stated[r * W + k])) continue;
            sum[0] += 1.0;
            sum[size] += k < accepted[r];
            sum[2 * size] += stated[r * W + k];
            sum[3 * size] += believed[r * W + k];
        }
    }
    for (int64_t i = 0; i < size; i++) {
        if (more[i] == 0.0) continue;
        for (int64_t kind = 0; kind < 4; kind++) sums[kind * size + i] += more[kind * size + i];
        const double full = more[i] > full_step ? more[i] / full_step : 1.0;
        const double moved = shift[i] + rate * (more[size + i] - more[3 * size + i]) / full;
        shift[i] = moved < -most ? -most : moved > most ? most : moved;
        odds[i] = exp(shift[i]);
    }
    free(more);
}

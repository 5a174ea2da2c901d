// The arithmetic of planning on plain arrays: what throughput.py, forecast.py and admit.py (and by belief.h estimates.py, drift.py
// and outlook.py) say in numpy. They explain it, are its twins, and serve where there is no C compiler. At few requests numpy spends
// a microsecond or more on every small operation, and planning has a hundred of them in a step of some ten milliseconds.
// R requests, W slots of a draft. All matrices are dense, and of doubles where nothing else is said.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "belief.h"
#include "ranking.h"

// throughput.py, verify_seconds, times refinement.py's factors [num_factors]. verify [C][max_tokens + 1], contexts and
// slope [C]; kv_tokens NaN: as measured.
void dspark_seconds(const double *verify, const double *contexts, const double *slope, int64_t C, int64_t max_tokens,
                    double kv_token_s, double context_len, double kv_tokens, double rows_per_request, const double *factors,
                    int64_t num_factors, int64_t first, int64_t count, double *seconds)
{
    int64_t low = 0;
    double weight = 0.0;
    if (C > 1 && context_len > contexts[0]) {
        while (low + 2 < C && contexts[low + 1] < context_len) low++;
        weight = (context_len - contexts[low]) / (contexts[low + 1] - contexts[low]);
    }
    const int64_t stride = max_tokens + 1;
    const double *near = verify + low * stride, *far = weight == 0.0 ? near : near + stride;
    const double last = near[max_tokens] + weight * (far[max_tokens] - near[max_tokens]);
    const double more = slope[low] + weight * ((weight == 0.0 ? slope[low] : slope[low + 1]) - slope[low]);
    const int reads = !isnan(kv_tokens) && kv_token_s != 0.0;
    const double measured_len = context_len > contexts[0] ? context_len : contexts[0];
    double grown = -INFINITY, most = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        const int64_t size = first + i;
        double s = size <= max_tokens ? near[size] + weight * (far[size] - near[size]) : last + more * (size - max_tokens);
        if (reads) {
            const double requests = size > rows_per_request ? size / rows_per_request : 1.0;
            s += kv_token_s * (kv_tokens - requests * measured_len);
            s = s > verify[1] ? s : verify[1];
            s = grown = s > grown ? s : grown;
        }
        s *= factors[size < num_factors ? size : num_factors - 1];
        most = s > most ? s : most;
        seconds[i] = most;
    }
}

// admit.py, _ranked, from survivals of confidence [R][W]: candidates [W][R], ranked [2 R W] of which the second half is scratch.
static void rank_candidates(const double *confidence, const int64_t *caps, int64_t R, int64_t W, float *candidates, float *ranked)
{
    for (int64_t r = 0; r < R; r++) {
        double survival = 1.0;
        for (int64_t k = 0; k < W; k++) {
            survival = k < caps[r] ? survival * clean(confidence[r * W + k]) : 0.0;
            candidates[k * R + r] = (float)survival;
        }
    }
    memcpy(ranked, candidates, R * W * sizeof *ranked);
    sort_descending(ranked, ranked + R * W, R * W);
}

// admit.py, _first.
static void take_first(const float *candidates, const float *ranked, int64_t count, int64_t R, int64_t W, int64_t *lengths)
{
    memset(lengths, 0, R * sizeof *lengths);
    if (!count) return;
    const float last = ranked[count - 1];
    int64_t left = count;
    for (int64_t i = 0; i < R * W; i++) left -= candidates[i] > last;
    for (int64_t i = 0; i < R * W;)
        for (int64_t r = 0; r < R; r++, i++)
            lengths[r] += candidates[i] > last || (candidates[i] == last && left-- > 0);
}

// admit.py, algorithm1. seconds [> R W] as far as candidates have a survival.
void dspark_algorithm1(const double *confidence, const int64_t *caps, int64_t R, int64_t W, const double *seconds,
                       double num_sampling, int64_t *lengths)
{
    float *candidates = malloc((3 * R * W + 1) * sizeof *candidates), *ranked = candidates + R * W;
    rank_candidates(confidence, caps, R, W, candidates, ranked);
    double tokens = num_sampling;
    int64_t count = 0;
    for (; count < R * W && ranked[count] > 0.0f; count++) {
        const double more = tokens + ranked[count];
        if (more / seconds[count + 1] <= tokens / seconds[count]) break;
        tokens = more;
    }
    take_first(candidates, ranked, count, R, W, lengths);
    free(candidates);
}

// admit.py, auto. outlook [m], seconds [> m]; stops [S], ascending from 0 to m, are where prices are compared.
void dspark_auto(const double *confidence, const int64_t *caps, int64_t R, int64_t W, const double *outlook, int64_t m,
                 const double *seconds, double num_sampling, const int64_t *stops, int64_t num_stops, double least_outlook,
                 double nearly, int64_t *lengths)
{
    float *candidates = malloc((3 * R * W + 1) * sizeof *candidates), *ranked = candidates + R * W;
    double *tokens = malloc((m + 1) * sizeof *tokens);
    rank_candidates(confidence, caps, R, W, candidates, ranked);
    double best = num_sampling / seconds[0];
    tokens[0] = 0.0;
    for (int64_t i = 0; i < m; i++) {
        tokens[i + 1] = tokens[i] + (outlook[i] > least_outlook ? outlook[i] : least_outlook);
        const double rate = (num_sampling + tokens[i + 1]) / seconds[i + 1];
        best = rate > best ? rate : best;
    }
    best *= nearly;
    int64_t count = 0;
    for (int64_t s = 0; s + 1 < num_stops && count == stops[s]; s++) {
        double ratio = INFINITY;
        for (int64_t t = s + 1; t < num_stops; t++) {
            const double gain = tokens[stops[t]] - tokens[stops[s]];
            const double price = (seconds[stops[t]] - seconds[stops[s]]) / (gain > least_outlook ? gain : least_outlook);
            ratio = price < ratio ? price : ratio;
        }
        ratio *= best;
        for (; count < stops[s + 1] && count < R * W && ranked[count] > 0.0f; count++) {
            const double expected = outlook[count] > least_outlook ? outlook[count] : least_outlook;
            if (ranked[count] < ratio * expected) break;
        }
    }
    take_first(candidates, ranked, count, R, W, lengths);
    free(candidates);
    free(tokens);
}

typedef struct {
    const double *verify, *draft; // [num_verify], [..][draft_stride]
    int64_t num_verify, draft_stride;
    double num_sampling;
    int64_t looks_ahead;
    const int64_t *edges; // [groups + 1]
} Prices;

typedef struct {
    double survival, weight;
    int64_t group, depth;
} Candidate;

// forecast.py, one entry of _rates: the first `count` groups draft `width` tokens.
static double rate_of(const Prices *p, const Candidate *candidates, int64_t n, int64_t count, int64_t width)
{
    const double draft_s = p->draft[p->edges[count] * p->draft_stride + width];
    double best = p->num_sampling / (p->verify[0] + draft_s), tokens = p->num_sampling, drafts = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (candidates[i].group >= count || candidates[i].depth >= width) continue;
        tokens += candidates[i].weight * candidates[i].survival;
        drafts += candidates[i].weight;
        int64_t low = (int64_t)drafts, high = low + 1;
        high = high < p->num_verify ? high : p->num_verify - 1;
        const double seconds = p->verify[low] + (drafts - low) * (p->verify[high] - p->verify[low]);
        const double rate = tokens / (seconds + draft_s);
        if (rate > best) best = rate;
        else if (!p->looks_ahead) break;
    }
    return best;
}

// forecast.py, Forecast and best. survival [R][W], spread [W] or null, edges [G + 1]. ranking [R]; best: requests, width; rate: of the
// best, and of nobody drafting.
void dspark_forecast(const double *survival, int64_t R, int64_t W, const double *spread, const double *verify,
                     int64_t num_verify, const double *draft, int64_t draft_stride, double num_sampling, int64_t looks_ahead,
                     const int64_t *edges, int64_t G, const int64_t *coarse, int64_t num_coarse, const int64_t *widths,
                     int64_t num_widths, int64_t *ranking, int64_t *best_draft, double *rates)
{
    const Prices prices = {verify, draft, num_verify, draft_stride, num_sampling, looks_ahead, edges};
    const int spreads = spread != NULL;
    const int64_t rows = spreads ? 2 * G : G, most = rows * W, larger = most > R ? most : R;
    double *values = malloc((larger + most + rows + 1) * sizeof *values), *halves = values + larger, *weights = halves + most;
    int64_t *order = malloc((2 * larger + 1) * sizeof *order);
    Candidate *candidates = malloc((most + 1) * sizeof *candidates);
    for (int64_t r = 0; r < R; r++) {
        values[r] = 0.0;
        for (int64_t k = 0; k < W; k++) values[r] += survival[r * W + k];
    }
    rank_descending(values, ranking, order, R);
    for (int64_t g = 0; g < G; g++) { // halves [W][rows]: by position, as candidates are ranked
        const int64_t size = edges[g + 1] - edges[g];
        double better = INFINITY;
        weights[g] = spreads ? size / 2.0 : size;
        for (int64_t k = 0; k < W; k++) {
            double mean = 0.0;
            for (int64_t i = edges[g]; i < edges[g + 1]; i++) mean += survival[ranking[i] * W + k];
            mean /= size;
            halves[k * rows + g] = mean;
            if (!spreads) continue;
            const double nearest = mean < 1.0 - mean ? mean : 1.0 - mean;
            double apart = sqrt(spread[k] * mean * (1.0 - mean));
            apart = apart < nearest ? apart : nearest;
            better = mean + apart < better ? mean + apart : better;
            halves[k * rows + g] = better;
            halves[k * rows + G + g] = mean - apart;
            weights[G + g] = size / 2.0;
        }
    }
    rank_descending(halves, order, order + larger, most);
    int64_t n = 0;
    for (int64_t i = 0; i < most && (i == 0 || halves[order[i]] > 0.0); i++) {
        const int64_t row = order[i] % rows;
        candidates[n++] = (Candidate){halves[order[i]], weights[row], row % G, order[i] / rows};
    }
    int64_t count = 0, width = 0;
    double best = -INFINITY;
    for (int64_t c = 0; c < num_coarse; c++) {
        for (int64_t w = 0; w < num_widths; w++) {
            const double rate = rate_of(&prices, candidates, n, coarse[c], widths[w]);
            if (rate > best) best = rate, count = coarse[c], width = widths[w];
        }
    }
    const int64_t first = count / 2 + 1, end = 2 * count < G ? 2 * count : G;
    const int64_t untried = end - first - (first <= count && count < end), stride = (untried + 7) / 8;
    int64_t finer = count;
    for (int64_t i = 0; i < untried; i += stride) {
        const int64_t tried = first + i + (first + i >= count && first <= count);
        const double rate = rate_of(&prices, candidates, n, tried, width);
        if (rate > best) best = rate, finer = tried;
    }
    best_draft[0] = edges[finer], best_draft[1] = width;
    rates[0] = best;
    rates[1] = num_sampling / (verify[0] + draft[0]);
    free(values);
    free(order);
    free(candidates);
}

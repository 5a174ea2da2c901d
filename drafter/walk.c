/* The walk of a vanilla Markov head where every request is greedy, whole in one call: see drafter/native_walk.py.
 *
 * Why: torch's operators walk in a dozen small steps per slot, on a processor whose caches the target has just swept. A whole draft of
 * the demo drafter takes 1.5 instead of 1.9 ms (one request, 7 tokens), 1.8 instead of 2.7 (four, 4), 3.3 instead of 4.7 (sixteen,
 * 2): medians, two cores. All threads share the columns of a slot and meet twice in it.
 */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "products.h"

/* scores: W2 [columns, rank]. embeddings: W1 [.., rank]. row_of [V]: W1 row of a target id, NULL where it is the id.
 * token_of [columns]: target ids, ascending, NULL where they are the columns. base [requests, slots, columns].
 * rows, tokens [requests, slots]: W1 row of the token before each slot, and what it draws. mixed [requests, rank],
 * tops, places [threads, requests]: working memory. */
typedef struct {
    const Product *scores;
    const bf16 *embeddings, *base;
    const int64_t *row_of, *token_of, *anchors;
    int64_t requests, slots, threads;
    int64_t *rows, *tokens, *places;
    bf16 *mixed;
    float *tops;
} Walk;

/* Largest corrected logit of each of n rows among panels from..to-1, and its first column. The correction is rounded to bfloat16
 * before it is added, as the product by itself returns it. */
static void best_of(const Walk *w, int64_t slot, int64_t first, int64_t n, int64_t from, int64_t to, float *tops, int64_t *places) {
    const int64_t columns = w->scores->outputs, stride = w->slots * columns;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 best[MAX_TILE];
    __m512i place[MAX_TILE];
    float sums[MAX_TILE][PANEL];
    for (int64_t r = 0; r < n; r++) best[r] = _mm512_set1_ps(-INFINITY), place[r] = _mm512_set1_epi32((int)(from * PANEL));
    for (int64_t i = from; i < to; i++) {
        panel_tile(w->scores, w->mixed, i, i + 1 < to ? i + 1 : i, 0, 1, first, n, sums);
        for (int64_t r = 0; r < n; r++)
            for (int64_t c = i * PANEL; c < (i + 1) * PANEL && c < columns; c += 16) {
                int64_t left = columns - c;
                __mmask16 real = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
                const bf16 *base = w->base + (first + r) * stride + slot * columns + c;
                __m512 change = widened((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sums[r] + (c - i * PANEL))));
                __m512 logit = _mm512_add_ps(widened(_mm256_maskz_loadu_epi16(real, base)), change);
                __mmask16 more = _mm512_mask_cmp_ps_mask(real, logit, best[r], _CMP_GT_OQ);
                best[r] = _mm512_mask_mov_ps(best[r], more, logit);
                place[r] = _mm512_mask_add_epi32(place[r], more, lane, _mm512_set1_epi32((int)c));
            }
    }
    for (int64_t r = 0; r < n; r++) {
        tops[first + r] = _mm512_reduce_max_ps(best[r]);
        __mmask16 equal = _mm512_cmp_ps_mask(best[r], _mm512_set1_ps(tops[first + r]), _CMP_EQ_OQ);
        places[first + r] = _mm512_mask_reduce_min_epi32(equal, place[r]);
    }
}

static void embed(const Walk *w, int64_t request, int64_t slot, int64_t token) {
    const int64_t rank = w->scores->inputs, row = w->row_of ? w->row_of[token] : token;
    w->rows[request * w->slots + slot] = row;
    memcpy(w->mixed + request * rank, w->embeddings + row * rank, rank * sizeof(bf16));
}

void dspark_greedy_walk(const Walk *w) {
    const int64_t panels = (w->scores->outputs + PANEL - 1) / PANEL;
    for (int64_t r = 0; r < w->requests; r++) embed(w, r, 0, w->anchors[r]);
#pragma omp parallel num_threads(w->threads)
    {
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        int64_t from, to;
        share(panels, part, parts, &from, &to);
        for (int64_t slot = 0; slot < w->slots; slot++) {
            for (int64_t first = 0; first < w->requests; first += MAX_TILE) {
                int64_t n = w->requests - first < MAX_TILE ? w->requests - first : MAX_TILE;
                best_of(w, slot, first, n, from, to, w->tops + part * w->requests, w->places + part * w->requests);
            }
#pragma omp barrier
#pragma omp for
            for (int64_t r = 0; r < w->requests; r++) {
                float top = -INFINITY;
                int64_t place = 0;
                for (int64_t p = 0; p < parts; p++)
                    if (w->tops[p * w->requests + r] > top) top = w->tops[p * w->requests + r], place = w->places[p * w->requests + r];
                int64_t token = w->token_of ? w->token_of[place] : place;
                w->tokens[r * w->slots + slot] = token;
                if (slot + 1 < w->slots) embed(w, r, slot + 1, token);
            }
        }
    }
}

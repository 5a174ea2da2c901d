/* The walk of a vanilla Markov head, whole in one call: greedy, or drawn from the largest logits of each slot. See
 * drafter/native_walk.py.
 *
 * Why: torch's operators walk in a dozen small steps per slot, twice as many where they sample, on a processor whose caches the target
 * has just swept. A whole greedy draft of the demo drafter takes 1.5 instead of 1.9 ms (one request, 7 tokens), 1.8 instead of 2.7
 * (four, 4), 3.3 instead of 4.7 (sixteen, 2), a sampled one 2.0 instead of 3.2 (one, 7), 2.3 instead of 3.5 (two, 7), 3.1 instead of
 * 4.6 (four, 7), 10.0 instead of 12.7 (sixteen, 7): medians, two cores. All threads share the columns of a slot and meet twice in it.
 */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "keyed_noise.h"
#include "products.h"

/* scores: W2 [columns, rank]. embeddings: W1 [.., rank]. row_of [V]: W1 row of a target id, NULL where it is the id.
 * token_of [columns]: target ids, ascending, NULL where they are the columns. base [requests, slots, columns].
 * rows, tokens [requests, slots]: W1 row of the token before each slot, and what it draws. mixed [requests, rank],
 * tops, places [threads, requests]: working memory.
 *
 * Of a sampled walk only: temperatures [requests], 0 where greedy; top_k [requests], 0 for all; top_p, min_p [requests], 1 and 0
 * for all; noise [requests, slots] in [0, 1), and where `seeded` [requests] is not 0, instead of it, keys [requests, slots] of
 * verifier/noise.py; law_ids, law [requests, slots, kept]: target ids, in ascending order, and the probabilities that the slot's
 * token was drawn by. logits [requests, columns], scratch [threads, 5, columns]: working memory. */
typedef struct {
    const Product *scores;
    const bf16 *embeddings, *base;
    const int64_t *row_of, *token_of, *anchors;
    int64_t requests, slots, threads;
    int64_t *rows, *tokens, *places;
    bf16 *mixed;
    float *tops;
    int64_t kept;
    const float *temperatures;
    const int64_t *top_k, *seeded, *keys;
    const double *top_p, *min_p, *noise;
    int64_t *law_ids;
    float *law, *logits, *scratch;
} Walk;

/* Corrected logits of columns c..c+15 of a request's slot, of which `sums` are the corrections. They are rounded to bfloat16 before
 * they are added, as the product by itself returns them. */
INLINE __m512 corrected(const Walk *w, int64_t request, int64_t slot, int64_t c, __mmask16 real, const float *sums) {
    const bf16 *base = w->base + (request * w->slots + slot) * w->scores->outputs + c;
    __m512 change = widened((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sums)));
    return _mm512_add_ps(widened(_mm256_maskz_loadu_epi16(real, base)), change);
}

/* Largest corrected logit of each of n rows among panels from..to-1, and its first column. */
static void best_of(const Walk *w, int64_t slot, int64_t first, int64_t n, int64_t from, int64_t to, float *tops, int64_t *places) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 best[MAX_TILE];
    __m512i place[MAX_TILE];
    float sums[MAX_TILE][PANEL];
    for (int64_t r = 0; r < n; r++) best[r] = _mm512_set1_ps(-INFINITY), place[r] = _mm512_set1_epi32((int)(from * PANEL));
    for (int64_t i = from; i < to; i++) {
        panel_tile(w->scores, w->mixed, i, i + 1 < to ? i + 1 : i, 0, 1, first, n, sums);
        for (int64_t r = 0; r < n; r++)
            for (int64_t c = i * PANEL; c < (i + 1) * PANEL; c += 16) {
                __mmask16 real = real_columns(w->scores->outputs, c);
                __m512 logit = corrected(w, first + r, slot, c, real, sums[r] + (c - i * PANEL));
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

static int64_t token_of(const Walk *w, int64_t column) { return w->token_of ? w->token_of[column] : column; }

static void embed(const Walk *w, int64_t request, int64_t slot, int64_t token) {
    const int64_t rank = w->scores->inputs, row = w->row_of ? w->row_of[token] : token;
    w->rows[request * w->slots + slot] = row;
    memcpy(w->mixed + request * rank, w->embeddings + row * rank, rank * sizeof(bf16));
}

/* The column of the largest corrected logit of a request, of what all threads found; of equal ones the first. */
static int64_t best_column(const Walk *w, int64_t request, int64_t parts) {
    float top = -INFINITY;
    int64_t place = 0;
    for (int64_t p = 0; p < parts; p++) {
        const int64_t at = p * w->requests + request;
        if (w->tops[at] > top) top = w->tops[at], place = w->places[at];
    }
    return place;
}

/* The corrected logits of n rows in panels from..to-1. */
static void correct(const Walk *w, int64_t slot, int64_t first, int64_t n, int64_t from, int64_t to) {
    float sums[MAX_TILE][PANEL];
    for (int64_t i = from; i < to; i++) {
        panel_tile(w->scores, w->mixed, i, i + 1 < to ? i + 1 : i, 0, 1, first, n, sums);
        for (int64_t r = 0; r < n; r++)
            for (int64_t c = i * PANEL; c < (i + 1) * PANEL; c += 16) {
                __mmask16 real = real_columns(w->scores->outputs, c);
                __m512 logit = corrected(w, first + r, slot, c, real, sums[r] + (c - i * PANEL));
                _mm512_mask_storeu_ps(w->logits + (first + r) * w->scores->outputs + c, real, logit);
            }
    }
}

/* The k-th largest of n numbers, which are reordered. */
static float kth_largest(float *v, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1, place = k - 1;
    while (low < high) {
        float pivot = v[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (v[i] > pivot) i++;
            while (v[j] < pivot) j--;
            if (i <= j) {
                float other = v[i];
                v[i++] = v[j], v[j--] = other;
            }
        }
        if (place <= j)
            high = j;
        else if (place >= i)
            low = i;
        else
            break;
    }
    return v[place];
}

/* The columns of a request's `kept` largest logits, ascending, and their logits; of equal ones the lowest columns. 0 where some logit
 * is no number. */
static int largest(const Walk *w, const float *logits, float *scratch, int32_t *chosen, float *values) {
    const int64_t columns = w->scores->outputs, groups = (columns + 15) / 16, kept = w->kept;
    float *tops = scratch, *copy = scratch + columns, *found = scratch + 2 * columns;
    int32_t *places = (int32_t *)(scratch + 3 * columns);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 least = _mm512_set1_ps(-INFINITY);
    for (int64_t g = 0; g < groups; g++) {
        __m512 v = _mm512_mask_loadu_ps(least, real_columns(w->scores->outputs, 16 * g), logits + 16 * g);
        if (_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q)) return 0;
        tops[g] = _mm512_reduce_max_ps(v);
    }
    /* the largest `kept` lie in groups whose tops are among the largest `kept` */
    float bound = -INFINITY;
    if (groups > kept) {
        memcpy(copy, tops, groups * sizeof *copy);
        bound = kth_largest(copy, groups, kept);
    }
    int64_t count = 0;
    for (int64_t g = 0; g < groups; g++) {
        if (tops[g] < bound) continue;
        __mmask16 real = real_columns(w->scores->outputs, 16 * g);
        __m512 v = _mm512_mask_loadu_ps(least, real, logits + 16 * g);
        __mmask16 good = _mm512_mask_cmp_ps_mask(real, v, _mm512_set1_ps(bound), _CMP_GE_OQ);
        _mm512_mask_compressstoreu_ps(found + count, good, v);
        _mm512_mask_compressstoreu_epi32(places + count, good, _mm512_add_epi32(lane, _mm512_set1_epi32((int)(16 * g))));
        count += __builtin_popcount(good);
    }
    memcpy(copy, found, count * sizeof *copy);
    const float last = kth_largest(copy, count, kept);
    int64_t equal = kept, taken = 0;
    for (int64_t i = 0; i < count; i++) equal -= found[i] > last;
    for (int64_t i = 0; i < count && taken < kept; i++)
        if (found[i] > last || (found[i] == last && equal-- > 0)) chosen[taken] = places[i], values[taken++] = found[i];
    return 1;
}

/* Cuts a law as verifier/truncation.py does: the first top_k in order of probability, of those the fewest whose share reaches top_p,
 * of those the ones with min_p of the largest. */
static void truncate_law(const Walk *w, int64_t request, float *p) {
    const int64_t kept = w->kept, top_k = w->top_k[request];
    const double top_p = w->top_p[request], min_p = w->min_p[request];
    int32_t order[kept];
    for (int64_t i = 0; i < kept; i++) {
        int64_t at = i;
        for (; at > 0 && p[order[at - 1]] < p[i]; at--) order[at] = order[at - 1];
        order[at] = (int32_t)i;
    }
    int64_t count = top_k > 0 && top_k < kept ? top_k : kept, last = 0;
    double mass = 0.0, reached = 0.0;
    for (int64_t i = 0; i < count; i++) mass += p[order[i]];
    while (last < count && (last == 0 || top_p >= 1.0 || reached < top_p * mass)) reached += p[order[last++]];
    while (last > 1 && p[order[last - 1]] < min_p * p[order[0]]) reached -= p[order[--last]];
    for (int64_t i = last; i < kept; i++) p[order[i]] = 0.0f;
    for (int64_t i = 0; i < last; i++) p[order[i]] = (float)(p[order[i]] / reached);
}

/* Which entry of a law wins with keyed noise; of equal ones the first. */
static int64_t race(const float *law, const int64_t *ids, int64_t count, int64_t key) {
    double best = -INFINITY;
    int64_t winner = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!(law[i] > 0.0f)) continue;
        const double score = log(law[i]) + keyed_gumbel(key, ids[i]);
        if (score > best) best = score, winner = i;
    }
    return winner;
}

/* Draws a request's slot from the softmax of its largest logits at its temperature; which of them. Logits that give no law make
 * one of NaN, as torch does. */
static int64_t draw(const Walk *w, int64_t request, int64_t slot, float *scratch) {
    const int64_t columns = w->scores->outputs, kept = w->kept, at = request * w->slots + slot;
    const float temperature = w->temperatures[request];
    float *p = w->law + at * kept, top = -INFINITY;
    double sum = 0.0, reached = 0.0;
    int32_t *chosen = (int32_t *)(scratch + 4 * columns);
    int64_t best = 0, taken = 0;
    if (!largest(w, w->logits + request * columns, scratch, chosen, p)) {
        for (int64_t i = 0; i < kept; i++) chosen[i] = (int32_t)i, p[i] = NAN;
    }
    for (int64_t i = 0; i < kept; i++)
        if (p[i] > top) top = p[i], best = i;
    for (int64_t i = 0; i < kept; i += 16) {
        __mmask16 real = kept - i >= 16 ? 0xffff : (__mmask16)((1 << (kept - i)) - 1);
        __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), real, p + i);
        v = exp_ps(_mm512_div_ps(_mm512_sub_ps(v, _mm512_set1_ps(top)), _mm512_set1_ps(temperature > 0.0f ? temperature : 1.0f)));
        _mm512_mask_storeu_ps(p + i, real, v);
    }
    for (int64_t i = 0; i < kept; i++) sum += p[i];
    for (int64_t i = 0; i < kept; i++) {
        p[i] = temperature > 0.0f ? (float)(p[i] / sum) : i == best;
        w->law_ids[at * kept + i] = token_of(w, chosen[i]);
    }
    if (temperature <= 0.0f) return best;
    if (w->top_k[request] > 0 || w->top_p[request] < 1.0 || w->min_p[request] > 0.0) truncate_law(w, request, p);
    if (w->seeded[request]) return race(p, w->law_ids + at * kept, kept, w->keys[at]);
    /* the law as it is sent, not what it would be without rounding, decides */
    double total = 0.0;
    for (int64_t i = 0; i < kept; i++) total += p[i];
    const double goal = fmin(w->noise[at] * total, nextafter(total, 0.0));
    for (; taken < kept - 1; taken++) {
        reached += p[taken];
        if (!(reached <= goal)) break;
    }
    return taken;
}

/* Greedy where nothing is kept. */
void dspark_walk(const Walk *w) {
    const int64_t columns = w->scores->outputs, panels = (columns + PANEL - 1) / PANEL;
    for (int64_t r = 0; r < w->requests; r++) embed(w, r, 0, w->anchors[r]);
#pragma omp parallel num_threads(w->threads)
    {
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        int64_t from, to;
        share(panels, part, parts, &from, &to);
        for (int64_t slot = 0; slot < w->slots; slot++) {
            for (int64_t first = 0; first < w->requests; first += MAX_TILE) {
                int64_t n = w->requests - first < MAX_TILE ? w->requests - first : MAX_TILE;
                if (w->kept)
                    correct(w, slot, first, n, from, to);
                else
                    best_of(w, slot, first, n, from, to, w->tops + part * w->requests, w->places + part * w->requests);
            }
#pragma omp barrier
#pragma omp for
            for (int64_t r = 0; r < w->requests; r++) {
                const int64_t at = r * w->slots + slot;
                if (w->kept)
                    w->tokens[at] = w->law_ids[at * w->kept + draw(w, r, slot, w->scratch + part * 5 * columns)];
                else
                    w->tokens[at] = token_of(w, best_column(w, r, parts));
                if (slot + 1 < w->slots) embed(w, r, slot + 1, w->tokens[at]);
            }
        }
    }
}

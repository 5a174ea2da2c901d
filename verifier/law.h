/* The law of one row of logits: temperature, then the cuts of verifier/truncation.py. Included by rejection.c.
 *
 * p of a column is its weight exp((logit - largest) / temperature), in float32, over the sum of those that are kept, in float64.
 * All cuts keep a prefix of the columns in order of weight (ties: lower column first). Where such a prefix ends is searched without
 * sorting: the weights are swept from the top down in bands, and the band in which the end lies is halved until one weight is left.
 */
#pragma once
#include <float.h>
#include <string.h>

#include "bfloat16.h"

enum { BLOCK = 512 };

/* weights [columns, padded with zeros to a multiple of 16]; sums [blocks]: what is kept of each BLOCK columns; total: of all. */
typedef struct {
    int64_t columns, blocks;
    float *weights;
    double *sums, total;
} Law;

/* A row of logits in either type. */
typedef struct {
    const void *values;
    int single; /* float32, else bfloat16 */
} Logits;

/* All columns above `bound` and the first `ties` of those at it; their mass. */
typedef struct {
    float bound;
    int64_t ties;
    double mass;
} Prefix;

INLINE __m512 logits_at(Logits row, int64_t c, __mmask16 real) {
    if (row.single) return _mm512_maskz_loadu_ps(real, (const float *)row.values + c);
    return widened(_mm256_maskz_loadu_epi16(real, (const bf16 *)row.values + c));
}

/* NaN where a logit is no number. */
static float largest(Logits row, int64_t columns) {
    __m512 best = _mm512_set1_ps(-INFINITY);
    __mmask16 broken = 0;
    for (int64_t c = 0; c < columns; c += 16) {
        __mmask16 real = real_columns(columns, c);
        __m512 x = logits_at(row, c, real);
        broken |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        best = _mm512_mask_max_ps(best, real, best, x);
    }
    return broken ? NAN : _mm512_reduce_max_ps(best);
}

typedef struct {
    __m512d low, high;
} Mass; /* in float64, so that a residual of nearly nothing is not rounding */

INLINE void add_mass(Mass *mass, __m512 each) {
    mass->low = _mm512_add_pd(mass->low, _mm512_cvtps_pd(_mm512_castps512_ps256(each)));
    mass->high = _mm512_add_pd(mass->high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(each, 1)));
}

INLINE double all_mass(const Mass *mass) { return _mm512_reduce_add_pd(_mm512_add_pd(mass->low, mass->high)); }

static void read_law(Law *law, Logits row, float top, float scale) {
    law->total = 0.0;
    for (int64_t b = 0; b < law->blocks; b++) {
        Mass mass = {_mm512_setzero_pd(), _mm512_setzero_pd()};
        for (int64_t c = b * BLOCK; c < (b + 1) * BLOCK && c < law->columns; c += 16) {
            __mmask16 real = real_columns(law->columns, c);
            __m512 x = _mm512_mul_ps(_mm512_sub_ps(logits_at(row, c, real), _mm512_set1_ps(top)), _mm512_set1_ps(scale));
            __m512 each = _mm512_maskz_mov_ps(real, exp_ps(x));
            _mm512_storeu_ps(law->weights + c, each);
            add_mass(&mass, each);
        }
        law->sums[b] = all_mass(&mass);
        law->total += law->sums[b];
    }
}

/* Number and mass of the weights low <= w < high among n, a multiple of 16. */
static int64_t between(const float *weights, int64_t n, float low, float high, double *mass) {
    Mass sum = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    int64_t count = 0;
    for (int64_t c = 0; c < n; c += 16) {
        __m512 w = _mm512_loadu_ps(weights + c);
        __mmask16 in = _mm512_cmp_ps_mask(w, _mm512_set1_ps(low), _CMP_GE_OQ) & _mm512_cmp_ps_mask(w, _mm512_set1_ps(high), _CMP_LT_OQ);
        count += __builtin_popcount(in);
        add_mass(&sum, _mm512_maskz_mov_ps(in, w));
    }
    *mass = all_mass(&sum);
    return count;
}

/* Puts the weights low <= w < high first, filled up with zeros to a multiple of 16; how many they are. `kept` may be `weights`. */
static int64_t sift(const float *weights, int64_t n, float low, float high, float *kept) {
    int64_t count = 0;
    for (int64_t c = 0; c < n; c += 16) {
        __m512 w = _mm512_loadu_ps(weights + c);
        __mmask16 in = _mm512_cmp_ps_mask(w, _mm512_set1_ps(low), _CMP_GE_OQ) & _mm512_cmp_ps_mask(w, _mm512_set1_ps(high), _CMP_LT_OQ);
        _mm512_storeu_ps(kept + count, _mm512_maskz_compress_ps(in, w));
        count += __builtin_popcount(in);
    }
    if (count % 16) memset(kept + count, 0, (16 - count % 16) * sizeof *kept);
    return count;
}

static int32_t bits_of(float w) {
    int32_t bits;
    memcpy(&bits, &w, sizeof bits);
    return bits;
}

static float float_of(int32_t bits) {
    float w;
    memcpy(&w, &bits, sizeof w);
    return w;
}

INLINE int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

/* The fewest first columns whose number (by_mass: mass) reaches a goal above 0; everything where it is out of reach.
 * list [padded columns]: working memory. */
static Prefix first_until(const Law *law, int by_mass, double goal, float *list) {
    const Prefix everything = {0.0f, 0, law->total};
    double above = 0.0, mass = 0.0, here; /* above: what counts towards the goal */
    float high = INFINITY, low = 0.0625f;
    int64_t count;
    for (;; high = low, low = fmaxf(low * 0.0625f, FLT_MIN)) {
        count = between(law->weights, padded(law->columns), low, high, &here);
        const double reached = above + (by_mass ? here : (double)count);
        if (reached >= goal) break;
        if (low == FLT_MIN) return everything; /* exp_ps returns nothing smaller but 0 */
        above = reached, mass += here;
    }
    count = sift(law->weights, padded(law->columns), low, high, list);
    for (;;) {
        __m512 least = _mm512_set1_ps(INFINITY), most = _mm512_setzero_ps();
        for (int64_t c = 0; c < count; c += 16) {
            __m512 w = _mm512_loadu_ps(list + c);
            least = _mm512_mask_min_ps(least, real_columns(count, c), least, w), most = _mm512_max_ps(most, w);
        }
        const float bottom = _mm512_reduce_min_ps(least), top = _mm512_reduce_max_ps(most);
        if (bottom == top) break;
        const float middle = float_of(bits_of(bottom) + (bits_of(top) - bits_of(bottom) + 1) / 2);
        const int64_t more = between(list, padded(count), middle, INFINITY, &here);
        const double reached = above + (by_mass ? here : (double)more);
        if (reached >= goal) {
            count = sift(list, padded(count), middle, INFINITY, list);
        } else {
            above = reached, mass += here;
            count = sift(list, padded(count), FLT_MIN, middle, list);
        }
    }
    Prefix prefix = {list[0], 1, mass}; /* the goal is above what comes before */
    while (prefix.ties < count && above + (double)prefix.ties * (by_mass ? prefix.bound : 1.0) < goal) prefix.ties++;
    prefix.mass += (double)prefix.ties * prefix.bound;
    return prefix;
}

static Prefix shorter(Prefix a, Prefix b) { return a.bound > b.bound || (a.bound == b.bound && a.ties < b.ties) ? a : b; }

static void keep(Law *law, Prefix prefix) {
    int64_t left = prefix.ties;
    law->total = 0.0;
    for (int64_t b = 0; b < law->blocks; b++) {
        Mass mass = {_mm512_setzero_pd(), _mm512_setzero_pd()};
        for (int64_t c = b * BLOCK; c < (b + 1) * BLOCK && c < law->columns; c += 16) {
            __m512 w = _mm512_loadu_ps(law->weights + c);
            __mmask16 kept = _mm512_cmp_ps_mask(w, _mm512_set1_ps(prefix.bound), _CMP_GT_OQ);
            __mmask16 ties = _mm512_cmp_ps_mask(w, _mm512_set1_ps(prefix.bound), _CMP_EQ_OQ);
            for (; ties && left > 0; left--, ties &= ties - 1) kept |= ties & -ties;
            w = _mm512_maskz_mov_ps(kept, w);
            _mm512_storeu_ps(law->weights + c, w);
            add_mass(&mass, w);
        }
        law->sums[b] = all_mass(&mass);
        law->total += law->sums[b];
    }
}

/* The first top_k (0: all); of those the fewest whose share reaches top_p (1: all); of those the ones with min_p of the largest. */
static void cut_law(Law *law, int64_t top_k, double top_p, double min_p, float *list) {
    Prefix prefix = {0.0f, 0, law->total};
    if (top_k > 0 && top_k < law->columns) prefix = first_until(law, 0, (double)top_k, list);
    if (top_p < 1.0) prefix = shorter(prefix, first_until(law, 1, top_p * prefix.mass, list));
    if (min_p > 0.0) prefix = shorter(prefix, (Prefix){(float)min_p, INT64_MAX, 0.0});
    keep(law, prefix);
}

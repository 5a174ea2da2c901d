/* Kernels of training between the matrix products, in bfloat16 on CPUs with AVX512-BF16: the vocabulary terms of the loss with
 * their gradient, and the backward passes of RMS norm and SwiGLU. Built at first use (drafter/train/native.py); torch
 * operators compute the same without them, in a dozen passes over memory.
 *
 * bfloat16 values travel as uint16_t; sums, maxima and exponentials are float32.
 */
#include <stdlib.h>
#include <string.h>

#include "bfloat16.h"

/* lanes i.. of a row of n */
INLINE __mmask16 lanes(int64_t i, int64_t n) { return n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1); }

INLINE float as_float(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Largest value of a row and its first column. NaN is never larger; the sums carry it to the caller. */
INLINE float row_max(const bf16 *z, int64_t v, int64_t *column) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    __m512i at = _mm512_setzero_si512(), here = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < v; i += 16) {
        __mmask16 k = lanes(i, v);
        __m512 x = widened(_mm256_maskz_loadu_epi16(k, z + i));
        __mmask16 larger = _mm512_mask_cmp_ps_mask(k, x, top, _CMP_GT_OQ);
        top = _mm512_mask_mov_ps(top, larger, x);
        at = _mm512_mask_mov_epi32(at, larger, here);
        here = _mm512_add_epi32(here, _mm512_set1_epi32(16));
    }
    float max = _mm512_reduce_max_ps(top);
    *column = _mm512_mask_reduce_min_epi32(_mm512_cmp_ps_mask(top, _mm512_set1_ps(max), _CMP_EQ_OQ), at);
    return max;
}

typedef struct {
    float ce, tv, kl;
} Weights;

/* One slot: logits z [v] become the gradient; terms gets ce, tv, kl. l, l_lse: the target's logits and log denominator.
 * q (tv (sign(q - p) - mean sign) + ce + kl sum p) - kl p - ce onehot, all times weight. q, p: scratch [v + 16]. */
INLINE void slot_terms(bf16 *z, const bf16 *l, float l_lse, int64_t label, float weight, Weights w, int64_t v, float *q, float *p,
                       float *terms, int64_t *best) {
    float max = row_max(z, v, best);
    __m512 sum = _mm512_setzero_ps(), inside = sum, mixed = sum;
    for (int64_t i = 0; i < v; i += 16) {
        __mmask16 k = lanes(i, v);
        __m512 x = widened(_mm256_maskz_loadu_epi16(k, z + i));
        __m512 e = _mm512_maskz_mov_ps(k, exp_ps(_mm512_sub_ps(x, _mm512_set1_ps(max))));
        __m512 law = widened(_mm256_maskz_loadu_epi16(k, l + i));
        law = _mm512_maskz_mov_ps(k, exp_ps(_mm512_sub_ps(law, _mm512_set1_ps(l_lse))));
        sum = _mm512_add_ps(sum, e);
        inside = _mm512_add_ps(inside, law);
        mixed = _mm512_fmadd_ps(law, x, mixed);
        _mm512_storeu_ps(q + i, e);
        _mm512_storeu_ps(p + i, law);
    }
    float total = _mm512_reduce_add_ps(sum), known = _mm512_reduce_add_ps(inside);
    float lse = max + logf(total), label_logit = label < 0 ? 0.0f : as_float(z[label]);
    __m512 scale = _mm512_set1_ps(1.0f / total), one = _mm512_set1_ps(1.0f);
    __m512 apart = _mm512_setzero_ps(), signs = apart;
    for (int64_t i = 0; i < v; i += 16) {
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(q + i), scale), d = _mm512_sub_ps(a, _mm512_loadu_ps(p + i));
        _mm512_storeu_ps(q + i, a);
        apart = _mm512_add_ps(apart, _mm512_abs_ps(d));
        signs = _mm512_mask_add_ps(signs, _mm512_cmp_ps_mask(d, _mm512_setzero_ps(), _CMP_GT_OQ), signs, a);
        signs = _mm512_mask_sub_ps(signs, _mm512_cmp_ps_mask(d, _mm512_setzero_ps(), _CMP_LT_OQ), signs, a);
    }
    float ce = label < 0 ? 0.0f : w.ce, outside = 1.0f - known;
    terms[0] = label < 0 ? 0.0f : lse - label_logit;
    terms[1] = _mm512_reduce_add_ps(apart) + (outside > 0 ? outside : 0.0f);
    terms[2] = known * lse - _mm512_reduce_add_ps(mixed);
    __m512 shift = _mm512_set1_ps(ce - w.tv * _mm512_reduce_add_ps(signs) + w.kl * known);
    __m512 tv = _mm512_set1_ps(w.tv), kl = _mm512_set1_ps(w.kl), each = _mm512_set1_ps(weight);
    for (int64_t i = 0; i < v; i += 16) {
        __m512 a = _mm512_loadu_ps(q + i), b = _mm512_loadu_ps(p + i), d = _mm512_sub_ps(a, b);
        __m512 s = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(d, _mm512_setzero_ps(), _CMP_GT_OQ), one);
        s = _mm512_mask_mov_ps(s, _mm512_cmp_ps_mask(d, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_set1_ps(-1.0f));
        __m512 g = _mm512_fnmadd_ps(kl, b, _mm512_mul_ps(a, _mm512_fmadd_ps(tv, s, shift)));
        if (label >= i && label < i + 16) g = _mm512_mask_sub_ps(g, (__mmask16)(1u << (label - i)), g, _mm512_set1_ps(ce));
        _mm256_mask_storeu_epi16(z + i, lanes(i, v), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(g, each)));
    }
}

/* logits [n, v] become gradients. law_logits [t, v], law_lse [t]; law_rows, labels (-1: outside), best [n]; weights [n]
 * already divided by their sum; terms [n, 3] unweighted ce, tv, kl. Returns 0, or 1 when there is no memory. */
int dspark_vocabulary_terms(bf16 *logits, const bf16 *law_logits, const float *law_lse, const int64_t *law_rows,
                            const int64_t *labels, const float *weights, float *terms, int64_t *best, int64_t n, int64_t v,
                            float ce, float tv, float kl) {
    int failed = 0;
#pragma omp parallel if (n * v > 65536)
    {
        float *scratch = malloc(2 * (v + 16) * sizeof(float));
#pragma omp for
        for (int64_t i = 0; i < n; i++) {
            int64_t row = law_rows[i];
            if (scratch)
                slot_terms(logits + i * v, law_logits + row * v, law_lse[row], labels[i], weights[i], (Weights){ce, tv, kl}, v,
                           scratch, scratch + v + 16, terms + 3 * i, best + i);
            else
                failed = 1;
        }
        free(scratch);
    }
    return failed;
}

/* gate_up [n, 2 f], grad [n, f] of silu(gate) * up -> grad_gate_up [n, 2 f]; f a multiple of 16 */
void dspark_swiglu_backward(const bf16 *gate_up, const bf16 *grad, bf16 *grad_gate_up, int64_t n, int64_t f) {
    __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for if (n * f > 32768)
    for (int64_t row = 0; row < n; row++) {
        const bf16 *gate = gate_up + row * 2 * f, *up = gate + f;
        bf16 *out = grad_gate_up + row * 2 * f;
        for (int64_t i = 0; i < f; i += 16) {
            __m512 g = widen(gate + i), u = widen(up + i), d = widen(grad + row * f + i);
            __m512 s = _mm512_div_ps(one, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), g))));
            __m512 silu = _mm512_mul_ps(g, s);
            /* silu' = s + silu (1 - s) */
            __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, s), s);
            narrow(out + i, _mm512_mul_ps(_mm512_mul_ps(d, u), slope));
            narrow(out + f + i, _mm512_mul_ps(d, silu));
        }
    }
}

/* x, grad [n, d] of rms_norm(x) * weight -> grad_x [n, d]; grad_weight [d] is added to. d a multiple of 16 */
int dspark_rms_norm_backward(const bf16 *x, const bf16 *weight, const bf16 *grad, bf16 *grad_x, float *grad_weight, int64_t n,
                             int64_t d, float eps) {
    int failed = 0;
#pragma omp parallel if (n * d > 65536)
    {
        float *partial = calloc(d, sizeof(float));
#pragma omp for
        for (int64_t row = 0; row < n; row++) {
            const bf16 *in = x + row * d, *g = grad + row * d;
            __m512 squares = _mm512_setzero_ps(), dots = squares;
            if (!partial) {
                failed = 1;
                continue;
            }
            for (int64_t i = 0; i < d; i += 16) {
                __m512 v = widen(in + i);
                squares = _mm512_fmadd_ps(v, v, squares);
                dots = _mm512_fmadd_ps(_mm512_mul_ps(widen(g + i), widen(weight + i)), v, dots);
            }
            float r = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)d + eps);
            __m512 scale = _mm512_set1_ps(r), pull = _mm512_set1_ps(r * r * _mm512_reduce_add_ps(dots) / (float)d);
            for (int64_t i = 0; i < d; i += 16) {
                __m512 v = widen(in + i), dy = widen(g + i);
                __m512 dx = _mm512_fnmadd_ps(pull, v, _mm512_mul_ps(dy, widen(weight + i)));
                narrow(grad_x + row * d + i, _mm512_mul_ps(dx, scale));
                __m512 sum = _mm512_fmadd_ps(_mm512_mul_ps(dy, scale), v, _mm512_loadu_ps(partial + i));
                _mm512_storeu_ps(partial + i, sum);
            }
        }
#pragma omp critical
        if (partial)
            for (int64_t i = 0; i < d; i++) grad_weight[i] += partial[i];
        free(partial);
    }
    return failed;
}

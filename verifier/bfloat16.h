/* bfloat16 in vectors of 16 float32, and exp: what every kernel here is written in. Included by each native.c. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))

/* Which of the columns c..c+15 there are. */
INLINE __mmask16 real_columns(int64_t columns, int64_t c) {
    int64_t left = columns - c;
    return left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
}

INLINE __m512 widened(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

INLINE __m512 widen(const bf16 *p) { return widened(_mm256_loadu_si256((const __m256i *)p)); }

INLINE void narrow(bf16 *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v)); }

/* exp(x) for x <= 0 or moderate x: 2^n * polynomial(r), relative error about 2e-7; below -87 it is 0, of NaN it is NaN */
INLINE __m512 exp_ps(__m512 x) {
    __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(seen, p, n);
}

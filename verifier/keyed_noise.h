/* Noise keyed by (seed, output position, token id): verifier/noise.py, number for number up to the last bits of log. */
#pragma once
#include "bfloat16.h"

INLINE uint64_t mix_bits(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Standard Gumbel noise of a token id under a key of noise.row_keys. */
INLINE double keyed_gumbel(int64_t key, int64_t id) {
    const uint64_t bits = mix_bits((uint64_t)key + ((uint64_t)id + 1) * 0x9E3779B97F4A7C15u) >> 12;
    return -log(-log(((double)bits + 0.5) * 0x1p-52));
}

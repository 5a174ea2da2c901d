/* Matrix products of a few rows with packed bfloat16 weights: out = x W^T (+ bias) (+ residual).
 *
 * Why not oneDNN: its products of the demo target take 12 to 14 ms at 1 to 8 rows, where reading the weights takes 8 (two cores,
 * 34 GB/s); these take 8.4 at 1 to 8 rows, 13 instead of 18 at 16, 42 instead of 48 at 64. With AMX (below) it is 9.9 at 1 to 8,
 * 11.6 at 16, 12.5 at 32 and 19.7 at 64, where the vectors of the same processor take 13, 34, 64 and 104. And a row's sums do not
 * depend on the other rows: every output is added up in one order of the inputs, whatever the batch, so that a token's
 * logits are the same bits alone, in a batch, and behind drafts.
 *
 * Layout: panels of 32 outputs; of each panel, for each pair of inputs, 32 x 2 values (two registers). Outputs are padded with
 * zeros to whole panels; the number of inputs is even.
 */
#include "tiles.h"

enum {
    PANEL = 32,
    MAX_TILE = 12, /* rows whose sums fit in the registers of AVX512 */
    MAX_ROWS = 32, /* and in those of AMX: two tiles of 16 */
    AHEAD = 2048   /* bytes that weights are fetched before their use */
};

typedef struct {
    const bf16 *weight; /* packed */
    const bf16 *bias;   /* [outputs] or NULL */
    int64_t inputs, outputs;
} Product;

INLINE void share(int64_t count, int64_t part, int64_t parts, int64_t *first, int64_t *last) {
    *first = count * part / parts;
    *last = count * (part + 1) / parts;
}

/* n rows of x against one panel -> sums [n][PANEL]. n is a constant, so that all sums stay in registers. */
INLINE void accumulate(const bf16 *x, int64_t stride, const bf16 *panel, int64_t pairs, const char *ahead, int64_t ahead_step,
                       const int n, float (*sums)[PANEL]) {
    __m512 acc[MAX_TILE][2];
    for (int r = 0; r < n; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++) {
        _mm_prefetch(ahead + p * ahead_step, _MM_HINT_T0);
        _mm_prefetch(ahead + p * ahead_step + 64, _MM_HINT_T0);
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + p * 2 * PANEL);
        __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + p * 2 * PANEL + PANEL);
        for (int r = 0; r < n; r++) {
            int32_t pair;
            __builtin_memcpy(&pair, x + r * stride + 2 * p, sizeof pair);
            __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, a);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, a);
        }
    }
    for (int r = 0; r < n; r++) {
        _mm512_storeu_ps(sums[r], acc[r][0]);
        _mm512_storeu_ps(sums[r] + 16, acc[r][1]);
    }
}

static void accumulate_tile(const bf16 *x, int64_t stride, const bf16 *panel, int64_t pairs, const char *ahead, int64_t ahead_step,
                            int64_t n, float (*sums)[PANEL]) {
#define TILE_OF(rows)                                                         \
    case rows:                                                                \
        accumulate(x, stride, panel, pairs, ahead, ahead_step, rows, sums);   \
        break;
    switch (n) {
        TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
        TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
    }
#undef TILE_OF
}

#ifdef __AMX_BF16__
/* By tiles: 32 inputs of 16 rows and 16 outputs an instruction, weights as the panels have them. At 32 rows it takes little more than
 * what reading the weights takes. It adds in another order than AVX512, so one of the two computes all of a product's rows. */
INLINE int by_tiles(const Product *product) { return tiles_granted && product->inputs % 32 == 0; }

/* upper (+ lower) rows of x against one panel -> sums [upper + lower][PANEL]. Tiles 0, 1: sums of the upper rows; 2, 3: of the lower;
 * 4, 5: inputs of both; 6, 7: weights. */
INLINE void accumulate_by_tiles(const bf16 *x, int64_t stride, const bf16 *panel, int64_t inputs, const char *ahead,
                                int64_t ahead_step, int upper, const int lower, float (*sums)[PANEL]) {
    const bf16 *x_lower = x + upper * stride;
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < inputs; i += 32) {
        for (int64_t p = i / 2; p < i / 2 + 16; p++) {
            _mm_prefetch(ahead + p * ahead_step, _MM_HINT_T0);
            _mm_prefetch(ahead + p * ahead_step + 64, _MM_HINT_T0);
        }
        _tile_loadd(6, panel + i * PANEL, 4 * PANEL);
        _tile_loadd(7, panel + i * PANEL + PANEL, 4 * PANEL);
        _tile_loadd(4, x + i, 2 * stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (lower) {
            _tile_loadd(5, x_lower + i, 2 * stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 4 * PANEL);
    _tile_stored(1, sums[0] + 16, 4 * PANEL);
    if (lower) {
        _tile_stored(2, sums[upper], 4 * PANEL);
        _tile_stored(3, sums[upper] + 16, 4 * PANEL);
    }
}

/* n rows, 1 to 32 */
static void accumulate_in_shape(const bf16 *x, int64_t stride, const bf16 *panel, int64_t inputs, const char *ahead,
                                int64_t ahead_step, int64_t n, float (*sums)[PANEL]) {
    const int upper = n > 16 ? (int)(n + 1) / 2 : (int)n;
    const int lower = (int)n - upper;
    shape_tiles((const int[8]){upper, upper, lower, lower, upper, lower, 16, 16});
    if (n > 16)
        accumulate_by_tiles(x, stride, panel, inputs, ahead, ahead_step, upper, lower, sums);
    else
        accumulate_by_tiles(x, stride, panel, inputs, ahead, ahead_step, upper, 0, sums);
    _tile_release();
}
#else
INLINE int by_tiles(const Product *product) { return 0; }
#endif

/* Rows of one call of panel_tile, at most. */
INLINE int64_t rows_at_once(const Product *product) { return by_tiles(product) ? MAX_ROWS : MAX_TILE; }

/* Rows first..last-1 of x against a panel. With several tiles of rows the panel is in the cache after the first, and the first
 * two fetch half of the `next` panel each; a single tile fetches its own panel ahead. */
INLINE void panel_tile(const Product *product, const bf16 *x, int64_t panel_index, int64_t next_index, int64_t tile, int64_t tiles,
                       int64_t first, int64_t n, float (*sums)[PANEL]) {
    const int64_t pairs = product->inputs / 2, panel_values = PANEL * product->inputs;
    const bf16 *panel = product->weight + panel_index * panel_values;
    const char *ahead = (const char *)panel + AHEAD;
    int64_t ahead_step = 128;
    if (tiles > 1) {
        ahead = (const char *)(product->weight + next_index * panel_values) + (tile & 1) * pairs * 64;
        ahead_step = 64;
    }
#ifdef __AMX_BF16__
    if (by_tiles(product)) {
        accumulate_in_shape(x + first * product->inputs, product->inputs, panel, product->inputs, ahead, ahead_step, n, sums);
        return;
    }
#endif
    accumulate_tile(x + first * product->inputs, product->inputs, panel, pairs, ahead, ahead_step, n, sums);
}

/* One row of sums: columns column..column+31 of out, as far as there are any. */
INLINE void store_sums(const Product *product, const float *sums, int64_t column, const bf16 *residual, bf16 *out) {
    for (int64_t i = 0; i < PANEL && column + i < product->outputs; i += 16) {
        int64_t left = product->outputs - column - i;
        __mmask16 real = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
        __m512 v = _mm512_loadu_ps(sums + i);
        if (product->bias) v = _mm512_add_ps(v, widened(_mm256_maskz_loadu_epi16(real, product->bias + column + i)));
        if (residual) v = _mm512_add_ps(v, widened(_mm256_maskz_loadu_epi16(real, residual + column + i)));
        _mm256_mask_storeu_epi16(out + column + i, real, (__m256i)_mm512_cvtneps_pbh(v));
    }
}

/* This thread's share of out [n, outputs] = x W^T + bias + residual; residual may be out itself, or NULL. */
INLINE void multiply(const Product *product, const bf16 *x, int64_t n, const bf16 *residual, bf16 *out, int64_t part, int64_t parts) {
    const int64_t panels = (product->outputs + PANEL - 1) / PANEL, width = product->outputs;
    const int64_t most = rows_at_once(product), tiles = (n + most - 1) / most;
    float sums[MAX_ROWS][PANEL];
    int64_t from, to;
    share(panels, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++)
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t first, last;
            share(n, tile, tiles, &first, &last);
            panel_tile(product, x, i, i + 1 < to ? i + 1 : i, tile, tiles, first, last - first, sums);
            for (int64_t row = first; row < last; row++)
                store_sums(product, sums[row - first], i * PANEL, residual ? residual + row * width : NULL, out + row * width);
        }
}

INLINE __m512 silu_ps(__m512 g) {
    __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), g));
    return _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* This thread's share of out [n, f] = silu(x G^T) * (x U^T), where the product's outputs are G, then U; f a multiple of PANEL. */
INLINE void multiply_swiglu(const Product *product, const bf16 *x, int64_t n, bf16 *out, int64_t part, int64_t parts) {
    const int64_t f = product->outputs / 2, panels = f / PANEL, most = rows_at_once(product), tiles = (n + most - 1) / most;
    float gate[MAX_ROWS][PANEL], up[MAX_ROWS][PANEL];
    int64_t from, to;
    share(panels, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++)
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t first, last;
            share(n, tile, tiles, &first, &last);
            int64_t next = i + 1 < to ? i + 1 : i;
            panel_tile(product, x, i, next, tile, tiles, first, last - first, gate);
            panel_tile(product, x, panels + i, panels + next, tile, tiles, first, last - first, up);
            for (int64_t row = first; row < last; row++)
                for (int64_t c = 0; c < PANEL; c += 16) {
                    __m512 g = _mm512_loadu_ps(gate[row - first] + c), u = _mm512_loadu_ps(up[row - first] + c);
                    if (product->bias) {
                        g = _mm512_add_ps(g, widen(product->bias + i * PANEL + c));
                        u = _mm512_add_ps(u, widen(product->bias + f + i * PANEL + c));
                    }
                    narrow(out + row * f + i * PANEL + c, _mm512_mul_ps(silu_ps(g), u));
                }
        }
}

/* Rotary positions and ragged paged attention of a bfloat16 step, flash style over tiles of keys.
 *
 * Row layout of projections: H query heads, KV key heads, KV value heads, each of hd values. Cache row: KV key heads, then KV value
 * heads. What a query sees is summed tile by tile from position 0 on, whatever else is in the batch: its bits depend on its own
 * context alone.
 */
#include "tiles.h"

enum { TILE = 32, MAX_QUERIES = 32, MAX_HEAD_DIM = 128 };

/* One step's attention; pointers and sizes that stay the same over its layers. Rows of one item belong to one request.
 * Row i sees positions 0..limits[i]-1 of its request's cached context, then `extra` rows of this batch from extra_first[i]. */
typedef struct {
    int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size, table_stride, num_items, extra;
    float scale;
    const float *cos, *sin;      /* [max_len, hd / 2] by position */
    const int64_t *positions;    /* [N] */
    const int64_t *slots;        /* [N] where the row's keys and values are written; NULL: they are not */
    const int32_t *limits;       /* [N] */
    const int32_t *extra_first;  /* [N]; unused when extra is 0 */
    const int32_t *row_tables;   /* [N] which block table */
    const int32_t *tables;       /* [tables, table_stride] block ids */
    const int32_t *items;        /* [num_items, 2] first row, number of rows */
} Step;

INLINE void rotate(bf16 *head, const float *cos, const float *sin, int hd) {
    int half = hd / 2;
    for (int i = 0; i < half; i += 16) {
        __m512 a = widen(head + i), b = widen(head + half + i);
        __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
        narrow(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        narrow(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

INLINE void copy_rows(bf16 *to, const bf16 *from, int64_t n) {
    for (int64_t i = 0; i < n; i += 32) _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
}

/* 16 rows of 16 dwords -> out[j] holds dword j of each row */
INLINE void transpose16(const bf16 *const *rows, int64_t offset, __m512i *out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        out[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        out[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        out[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
}

/* Where keys first..first+TILE-1 of a request stand: cached rows by its table, then this batch's own rows. */
INLINE void locate(const Step *s, const bf16 *qkv, const bf16 *pool, const int32_t *table, int64_t limit, int64_t extra_first,
                   int64_t total, int64_t first, int64_t kv_head, const bf16 **keys, const bf16 **values) {
    int64_t cache_row = 2 * s->num_kv_heads * s->head_dim, value_offset = s->num_kv_heads * s->head_dim;
    int64_t batch_row = (s->num_heads + 2 * s->num_kv_heads) * s->head_dim;
    int64_t block = first / s->block_size, offset = first % s->block_size;
    for (int64_t j = 0; j < TILE; j++) {
        const int64_t key = first + j;
        const bf16 *row;
        if (key >= total) {
            keys[j] = keys[j - 1];
            values[j] = values[j - 1];
            continue;
        }
        if (key < limit) {
            row = pool + ((int64_t)table[block] * s->block_size + offset) * cache_row;
            if (++offset == s->block_size) offset = 0, block++;
        } else
            row = qkv + (extra_first + key - limit) * batch_row + s->num_heads * s->head_dim;
        keys[j] = row + kv_head * s->head_dim;
        values[j] = keys[j] + value_offset;
    }
}

/* Asks for one head of cached rows first..first+TILE-1, which no prefetcher of the processor expects: they lie far apart, in blocks
 * anywhere. Into the second level, for it may wait for more lines at once than the first: 1.3 -> 0.9 us a tile of 64 values a key. */
INLINE void fetch_tile(const Step *s, const bf16 *pool, const int32_t *table, int64_t first, int64_t limit, int64_t kv_head,
                       const int hd) {
    const int64_t cache_row = 2 * s->num_kv_heads * hd, end = first + TILE < limit ? first + TILE : limit;
    while (first < end) {
        int64_t block = first / s->block_size, next = (block + 1) * s->block_size < end ? (block + 1) * s->block_size : end;
        const bf16 *row = pool + ((int64_t)table[block] * s->block_size + first % s->block_size) * cache_row + kv_head * hd;
        for (; first < next; first++, row += cache_row)
            for (int i = 0; i < hd; i += 32) {
                _mm_prefetch((const char *)(row + i), _MM_HINT_T1);
                _mm_prefetch((const char *)(row + cache_row / 2 + i), _MM_HINT_T1);
            }
    }
}

INLINE void fetch_work(const Step *s, const bf16 *pool, int64_t work, const int hd) {
    if (work >= s->num_items * s->num_kv_heads) return;
    const int32_t *item = s->items + 2 * (work / s->num_kv_heads);
    const int32_t *table = s->tables + (int64_t)s->row_tables[item[0]] * s->table_stride;
    fetch_tile(s, pool, table, 0, s->limits[item[0] + item[1] - 1], work % s->num_kv_heads, hd);
}

/* One tile of keys for `n` queries (a constant, so that their independent sums fill the pipeline): scores, running softmax, values. */
typedef struct {
    __m512 acc[MAX_QUERIES][MAX_HEAD_DIM / 16], sums[MAX_QUERIES];
    float top[MAX_QUERIES];
    const bf16 *query[MAX_QUERIES];
    int64_t visible[MAX_QUERIES];
} Queries;

/* Scores of a tile's keys for query q, as what they weigh, bfloat16 in pairs; moves the peak, and with it what was summed before. */
INLINE void weigh(Queries *qs, int64_t q, int64_t first, __m512 left, __m512 right, int32_t *weights, const int hd) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    int64_t remain = qs->visible[q] - first;
    if (remain < TILE) {
        __m512i limit = _mm512_set1_epi32((int)remain);
        left = _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(lane, limit), lowest, left);
        __m512i upper = _mm512_add_epi32(lane, _mm512_set1_epi32(16));
        right = _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(upper, limit), lowest, right);
    }
    float *top = &qs->top[q];
    float tile_top = _mm512_reduce_max_ps(_mm512_max_ps(left, right));
    if (tile_top > *top) {
        __m512 shrink = *top == -INFINITY ? _mm512_setzero_ps() : exp_ps(_mm512_set1_ps(*top - tile_top));
        *top = tile_top;
        qs->sums[q] = _mm512_mul_ps(qs->sums[q], shrink);
        for (int i = 0; i < hd / 16; i++) qs->acc[q][i] = _mm512_mul_ps(qs->acc[q][i], shrink);
    }
    /* a masked score of -inf weighs 0; every query here sees a key of the tile, so that the peak is finite */
    __m512 peak = _mm512_set1_ps(*top);
    left = exp_ps(_mm512_sub_ps(left, peak));
    right = exp_ps(_mm512_sub_ps(right, peak));
    qs->sums[q] = _mm512_add_ps(qs->sums[q], _mm512_add_ps(left, right));
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

INLINE void attend_tile(Queries *qs, int64_t q0, const int n, int64_t first, const __m512i (*kt)[MAX_HEAD_DIM / 2],
                        const __m512i (*vt)[MAX_HEAD_DIM / 16], __m512 scale, const int hd) {
    __m512 left[2], right[2];
    int32_t weights[2][TILE / 2] __attribute__((aligned(64)));
    {
        __m512 s[2][4];
        for (int q = 0; q < n; q++)
            for (int i = 0; i < 4; i++) s[q][i] = _mm512_setzero_ps();
        for (int p = 0; p < hd / 2; p += 2)
            for (int q = 0; q < n; q++) {
                const int32_t *pairs = (const int32_t *)qs->query[q0 + q];
                __m512bh a = (__m512bh)_mm512_set1_epi32(pairs[p]), b = (__m512bh)_mm512_set1_epi32(pairs[p + 1]);
                s[q][0] = _mm512_dpbf16_ps(s[q][0], (__m512bh)kt[0][p], a);
                s[q][1] = _mm512_dpbf16_ps(s[q][1], (__m512bh)kt[1][p], a);
                s[q][2] = _mm512_dpbf16_ps(s[q][2], (__m512bh)kt[0][p + 1], b);
                s[q][3] = _mm512_dpbf16_ps(s[q][3], (__m512bh)kt[1][p + 1], b);
            }
        for (int q = 0; q < n; q++) {
            left[q] = _mm512_mul_ps(_mm512_add_ps(s[q][0], s[q][2]), scale);
            right[q] = _mm512_mul_ps(_mm512_add_ps(s[q][1], s[q][3]), scale);
        }
    }
    for (int q = 0; q < n; q++) weigh(qs, q0 + q, first, left[q], right[q], weights[q], hd);
    __m512 acc[2][MAX_HEAD_DIM / 16];
    for (int q = 0; q < n; q++)
        for (int i = 0; i < hd / 16; i++) acc[q][i] = qs->acc[q0 + q][i];
    for (int j = 0; j < TILE / 2; j++)
        for (int q = 0; q < n; q++) {
            __m512bh w = (__m512bh)_mm512_set1_epi32(weights[q][j]);
            for (int i = 0; i < hd / 16; i++) acc[q][i] = _mm512_dpbf16_ps(acc[q][i], (__m512bh)vt[j][i], w);
        }
    for (int q = 0; q < n; q++)
        for (int i = 0; i < hd / 16; i++) qs->acc[q0 + q][i] = acc[q][i];
}

#ifdef __AMX_BF16__
enum { TILE_QUERIES = 16 };

/* The same by AMX, n <= 16 queries at once: 16 requests of 150 tokens take what they took by vectors, with two rows each a sixth less,
 * with three a third. packed: their values, [n][hd]. Tiles 0, 1: scores; 2: queries, then weights; 3, 4: keys,
 * then values; 5: sums. */
INLINE void attend_tile_by_tiles(Queries *qs, int64_t q0, int64_t n, int64_t first, const bf16 *packed,
                                 const __m512i (*kt)[MAX_HEAD_DIM / 2], const __m512i (*vt)[MAX_HEAD_DIM / 16], __m512 scale,
                                 const int hd) {
    float scores[TILE_QUERIES][TILE] __attribute__((aligned(64)));
    int32_t weights[TILE_QUERIES][TILE / 2] __attribute__((aligned(64)));
    __asm__ volatile("" : : : "memory");
    _tile_zero(0);
    _tile_zero(1);
    for (int i = 0; i < hd / 32; i++) {
        _tile_loadd(2, packed + 32 * i, 2 * hd);
        _tile_loadd(3, kt[0] + 16 * i, 64);
        _tile_loadd(4, kt[1] + 16 * i, 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 2, 4);
    }
    _tile_stored(0, scores[0], 4 * TILE);
    _tile_stored(1, scores[0] + 16, 4 * TILE);
    __asm__ volatile("" : : : "memory");
    for (int64_t q = 0; q < n; q++) {
        __m512 left = _mm512_mul_ps(_mm512_load_ps(scores[q]), scale), right = _mm512_mul_ps(_mm512_load_ps(scores[q] + 16), scale);
        weigh(qs, q0 + q, first, left, right, weights[q], hd);
    }
    __asm__ volatile("" : : : "memory");
    _tile_loadd(2, weights[0], 64);
    for (int i = 0; i < hd / 16; i++) {
        _tile_loadd(5, &qs->acc[q0][i], sizeof qs->acc[0]);
        _tile_loadd(3, &vt[0][i], sizeof vt[0]);
        _tile_dpbf16ps(5, 2, 3);
        _tile_stored(5, &qs->acc[q0][i], sizeof qs->acc[0]);
    }
    __asm__ volatile("" : : : "memory");
}
#endif

/* An item's rows against one key head, all query heads of its group, flash style over tiles of keys; at last it asks for the first
 * tile of `next`, the work that this thread does then. */
INLINE void attend_item(const Step *s, const bf16 *qkv, const bf16 *pool, bf16 *out, int64_t work, int64_t next,
                        const int hd) {
    const int32_t *item = s->items + 2 * (work / s->num_kv_heads);
    const int64_t row0 = item[0], rows = item[1], kv_head = work % s->num_kv_heads;
    const int64_t group = s->num_heads / s->num_kv_heads, queries = rows * group;
    const int64_t batch_row = (s->num_heads + 2 * s->num_kv_heads) * hd;
    const int64_t cached = s->limits[row0 + rows - 1], total = cached + s->extra;
    const int32_t *table = s->tables + (int64_t)s->row_tables[row0] * s->table_stride;
    const int64_t extra_first = s->extra ? s->extra_first[row0] : 0;
    Queries qs;
    for (int64_t q = 0; q < queries; q++) {
        int64_t row = row0 + q / group;
        qs.query[q] = qkv + row * batch_row + (kv_head * group + q % group) * hd;
        qs.visible[q] = s->extra ? total : s->limits[row];
        qs.top[q] = -INFINITY;
        qs.sums[q] = _mm512_setzero_ps();
        for (int i = 0; i < hd / 16; i++) qs.acc[q][i] = _mm512_setzero_ps();
    }
    const __m512 scale = _mm512_set1_ps(s->scale);
    int64_t q0 = 0;
#ifdef __AMX_BF16__
    int64_t shaped = 0;
    bf16 packed[MAX_QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64)));
    if (tiles_granted)
        for (int64_t q = 0; q < queries; q++) copy_rows(packed + q * hd, qs.query[q], hd);
#endif
    for (int64_t first = 0; first < total; first += TILE) {
        const bf16 *keys[TILE], *values[TILE];
        __m512i kt[2][MAX_HEAD_DIM / 2], vt[TILE / 2][MAX_HEAD_DIM / 16];
        locate(s, qkv, pool, table, cached, extra_first, total, first, kv_head, keys, values);
        if (first + TILE < cached)
            fetch_tile(s, pool, table, first + TILE, cached, kv_head, hd);
        else if (first + TILE >= total)
            fetch_work(s, pool, next, hd);
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < hd / 32; i++) transpose16(keys + 16 * half, 32 * i, kt[half] + 16 * i);
        for (int j = 0; j < TILE / 2; j++)
            for (int i = 0; i < hd / 32; i++) {
                __m512i v0 = _mm512_loadu_si512(values[2 * j] + 32 * i), v1 = _mm512_loadu_si512(values[2 * j + 1] + 32 * i);
                vt[j][2 * i] = _mm512_unpacklo_epi16(v0, v1);
                vt[j][2 * i + 1] = _mm512_unpackhi_epi16(v0, v1);
            }
        /* rows see ever more, so whoever saw nothing of this tile sees nothing of the next ones */
        while (q0 < queries && qs.visible[q0] <= first) q0++;
        int64_t q = q0;
#ifdef __AMX_BF16__
        if (tiles_granted) {
            const int64_t parts = (queries - q0 + TILE_QUERIES - 1) / TILE_QUERIES;
            for (int64_t part = 0; part < parts; part++) {
                const int64_t n = (queries - q + parts - part - 1) / (parts - part);
                if (n != shaped) {
                    const int rows = (int)(shaped = n);
                    shape_tiles((const int[8]){rows, rows, rows, 16, 16, rows});
                }
                attend_tile_by_tiles(&qs, q, n, first, packed + q * hd, kt, vt, scale, hd);
                q += n;
            }
            continue;
        }
#endif
        for (; q + 2 <= queries; q += 2) attend_tile(&qs, q, 2, first, kt, vt, scale, hd);
        if (q < queries) attend_tile(&qs, q, 1, first, kt, vt, scale, hd);
    }
#ifdef __AMX_BF16__
    if (shaped) _tile_release();
#endif
    /* unpacklo/hi left each 32 columns as (0-3 8-11 16-19 24-27) and (4-7 12-15 20-23 28-31) */
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t q = 0; q < queries; q++) {
        bf16 *to = out + (row0 + q / group) * s->num_heads * hd + (kv_head * group + q % group) * hd;
        __m512 norm = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(qs.sums[q]));
        for (int i = 0; i < hd / 32; i++) {
            __m512 a = _mm512_mul_ps(qs.acc[q][2 * i], norm), b = _mm512_mul_ps(qs.acc[q][2 * i + 1], norm);
            narrow(to + 32 * i, _mm512_permutex2var_ps(a, low, b));
            narrow(to + 32 * i + 16, _mm512_permutex2var_ps(a, high, b));
        }
    }
}

INLINE void attend_items(const Step *s, const bf16 *qkv, const bf16 *pool, bf16 *out, int64_t work, int64_t next) {
    if (s->head_dim == 64)
        attend_item(s, qkv, pool, out, work, next, 64);
    else if (s->head_dim == 128)
        attend_item(s, qkv, pool, out, work, next, 128);
    else
        attend_item(s, qkv, pool, out, work, next, 32);
}

/* Rotates a row's queries and keys in place, and writes its keys and values to the cache. */
INLINE void rotate_row(const Step *s, bf16 *qkv, bf16 *pool, int64_t row) {
    const int64_t hd = s->head_dim, cache_row = 2 * s->num_kv_heads * hd;
    bf16 *heads = qkv + row * (s->num_heads + 2 * s->num_kv_heads) * hd;
    const float *cos = s->cos + s->positions[row] * (hd / 2), *sin = s->sin + s->positions[row] * (hd / 2);
    for (int64_t h = 0; h < s->num_heads + s->num_kv_heads; h++) rotate(heads + h * hd, cos, sin, (int)hd);
    if (s->slots) copy_rows(pool + s->slots[row] * cache_row, heads + s->num_heads * hd, cache_row);
}

/* What a bfloat16 step computes on CPUs with AVX512-BF16: single operations, and all decoder layers in one call. Built at first
 * use (verifier/native.py); torch operators compute the same without it.
 *
 * bfloat16 values travel as uint16_t; sums, maxima and exponentials are float32.
 */
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#include "attention.h"
#include "products.h"

enum { SPINS = 4000 /* some 100 us; then the core is offered to others */ };

INLINE void norm_row(const bf16 *in, const bf16 *weight, bf16 *out, int64_t d, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < d; i += 16) {
        __m512 v = widen(in + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)d + eps));
    for (int64_t i = 0; i < d; i += 16) narrow(out + i, _mm512_mul_ps(_mm512_mul_ps(widen(in + i), scale), widen(weight + i)));
}

/* x [n, d] -> out [n, d]; d a multiple of 16 */
void dspark_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t n, int64_t d, float eps) {
#pragma omp parallel for if (n * d > 65536)
    for (int64_t row = 0; row < n; row++) norm_row(x + row * d, weight, out + row * d, d, eps);
}

/* gate_up [n, 2 f] (gate, then up) -> out [n, f]; f a multiple of 16 */
void dspark_swiglu(const bf16 *gate_up, bf16 *out, int64_t n, int64_t f) {
#pragma omp parallel for if (n * f > 32768)
    for (int64_t row = 0; row < n; row++) {
        const bf16 *gate = gate_up + row * 2 * f, *up = gate + f;
        for (int64_t i = 0; i < f; i += 16)
            narrow(out + row * f + i, _mm512_mul_ps(silu_ps(widen(gate + i)), widen(up + i)));
    }
}

/* out [n, outputs] = x [n, inputs] W^T + bias + residual */
void dspark_multiply(const Product *product, const bf16 *x, int64_t n, const bf16 *residual, bf16 *out) {
#pragma omp parallel
    multiply(product, x, n, residual, out, omp_get_thread_num(), omp_get_num_threads());
}

/* Largest value of each row of logits [n, v] and its first column; a row with a NaN has the value NaN. */
void dspark_peak(const bf16 *logits, float *tops, int64_t *columns, int64_t n, int64_t v) {
#pragma omp parallel for if (n * v > 65536)
    for (int64_t row = 0; row < n; row++) {
        const bf16 *in = logits + row * v;
        const __m512 lowest = _mm512_set1_ps(-INFINITY);
        __m512 best = lowest;
        __mmask16 nan = 0;
        for (int64_t i = 0; i < v; i += 16) {
            __mmask16 real = v - i >= 16 ? 0xffff : (__mmask16)((1 << (v - i)) - 1);
            __m512 x = _mm512_mask_blend_ps(real, lowest, widened(_mm256_maskz_loadu_epi16(real, in + i)));
            best = _mm512_max_ps(best, x);
            nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        }
        tops[row] = nan ? NAN : _mm512_reduce_max_ps(best);
        columns[row] = 0;
        for (int64_t i = 0; i < v && !nan; i += 16) {
            __mmask16 real = v - i >= 16 ? 0xffff : (__mmask16)((1 << (v - i)) - 1);
            __m512 x = widened(_mm256_maskz_loadu_epi16(real, in + i));
            __mmask16 found = _mm512_mask_cmp_ps_mask(real, x, _mm512_set1_ps(tops[row]), _CMP_EQ_OQ);
            if (!found) continue;
            columns[row] = i + __builtin_ctz(found);
            break;
        }
    }
}

/* qkv [N, H + 2 KV, hd], rotated in place; pool: this layer's cache; out [N, H * hd] */
void dspark_attend(const Step *s, bf16 *qkv, bf16 *pool, bf16 *out) {
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < s->num_rows; row++) rotate_row(s, qkv, pool, row);
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < s->num_items * s->num_kv_heads; work++) attend_items(s, qkv, pool, out, work, work + 1);
    }
}

/* A decoder layer; norms [d], qk_norm [H + KV, hd] or NULL. tap: first column of `taps` for its output, or -1. */
typedef struct {
    const bf16 *input_norm, *mlp_norm, *qk_norm;
    Product qkv, out, gate_up, down;
    int64_t tap;
} Layer;

/* All that one pass over the layers reads and writes. hidden [N, d] in place; pool: layer i's cache at i * pool_stride values;
 * taps [N, taps_stride]; normed [N, d], qkv, attended [N, H * hd], inner [N, f] are working memory; progress: layers done. */
typedef struct {
    const Layer *layers;
    const Step *step;
    int64_t num_layers, hidden_size, pool_stride, taps_stride;
    float eps;
    bf16 *hidden, *pool, *taps, *normed, *qkv, *attended, *inner;
    volatile int64_t *progress;
} Pass;

/* Threads meet here ten times a layer, so they wait awake: OpenMP's own barrier may sleep, which costs more than the phase. */
typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int phase;
    _Alignas(64) atomic_long next; /* attention work that is not taken yet */
} Meeting;

INLINE void meet(Meeting *m, int parts) {
    if (parts == 1) return;
    int phase = atomic_load(&m->phase);
    if (atomic_fetch_add(&m->arrived, 1) == parts - 1) {
        atomic_store(&m->arrived, 0);
        atomic_store(&m->phase, phase + 1);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&m->phase, memory_order_acquire) == phase; spins++) {
        if (spins < SPINS)
            _mm_pause();
        else
            sched_yield();
    }
}

INLINE void norm_heads(const Step *s, const bf16 *weight, bf16 *heads, float eps) {
    for (int64_t h = 0; h < s->num_heads + s->num_kv_heads; h++)
        norm_row(heads + h * s->head_dim, weight + h * s->head_dim, heads + h * s->head_dim, s->head_dim, eps);
}

static void run_layer(const Pass *p, int64_t index, Meeting *m, int part, int parts) {
    const Layer *layer = p->layers + index;
    const Step *s = p->step;
    const int64_t n = s->num_rows, d = p->hidden_size, heads = (s->num_heads + 2 * s->num_kv_heads) * s->head_dim;
    bf16 *pool = p->pool + index * p->pool_stride;
    int64_t from, to;
    share(n, part, parts, &from, &to);
    for (int64_t row = from; row < to; row++) norm_row(p->hidden + row * d, layer->input_norm, p->normed + row * d, d, p->eps);
    meet(m, parts);
    multiply(&layer->qkv, p->normed, n, NULL, p->qkv, part, parts);
    if (part == 0) atomic_store(&m->next, 0);
    meet(m, parts);
    for (int64_t row = from; row < to; row++) {
        if (layer->qk_norm) norm_heads(s, layer->qk_norm, p->qkv + row * heads, p->eps);
        rotate_row(s, p->qkv, pool, row);
    }
    meet(m, parts);
    /* a thread takes what comes next before it begins, so that it can ask for its keys meanwhile */
    for (int64_t work = atomic_fetch_add(&m->next, 1), next; work < s->num_items * s->num_kv_heads; work = next) {
        next = atomic_fetch_add(&m->next, 1);
        attend_items(s, p->qkv, pool, p->attended, work, next);
    }
    meet(m, parts);
    multiply(&layer->out, p->attended, n, p->hidden, p->hidden, part, parts);
    meet(m, parts);
    for (int64_t row = from; row < to; row++) norm_row(p->hidden + row * d, layer->mlp_norm, p->normed + row * d, d, p->eps);
    meet(m, parts);
    multiply_swiglu(&layer->gate_up, p->normed, n, p->inner, part, parts);
    meet(m, parts);
    multiply(&layer->down, p->inner, n, p->hidden, p->hidden, part, parts);
    meet(m, parts);
    if (layer->tap >= 0)
        for (int64_t row = from; row < to; row++) copy_rows(p->taps + row * p->taps_stride + layer->tap, p->hidden + row * d, d);
    if (part == 0) *p->progress += 1;
}

/* The residual stream of a step through all layers. */
void dspark_run_layers(const Pass *p) {
    Meeting meeting = {0};
#pragma omp parallel
    for (int64_t i = 0; i < p->num_layers; i++) run_layer(p, i, &meeting, omp_get_thread_num(), omp_get_num_threads());
}

/* The matrix products of the layers and nothing else, each of the same input: what a pass cannot undercut. */
void dspark_run_products(const Pass *p) {
    Meeting meeting = {0};
    const int64_t n = p->step->num_rows;
#pragma omp parallel
    for (int64_t i = 0; i < p->num_layers; i++) {
        const Layer *layer = p->layers + i;
        int part = omp_get_thread_num(), parts = omp_get_num_threads();
        multiply(&layer->qkv, p->normed, n, NULL, p->qkv, part, parts);
        meet(&meeting, parts);
        multiply(&layer->out, p->attended, n, NULL, p->hidden, part, parts);
        meet(&meeting, parts);
        multiply_swiglu(&layer->gate_up, p->normed, n, p->inner, part, parts);
        meet(&meeting, parts);
        multiply(&layer->down, p->inner, n, NULL, p->hidden, part, parts);
        meet(&meeting, parts);
    }
}

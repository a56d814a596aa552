/* Products on a CPU with AMX, from two rows on (W4A16: from one): 4-bit weights decoded into tiles, fp32 sums,
 * the epilogue in the same pass.
 *
 *   y[m,n] = (sum_k x[m,k] * e2m1(w[n,k]) * w_scale[n,k/g]) * (w_tensor_scale[range of n] * x_tensor_scale[m])
 *            + bias[n]
 *
 * x: bf16 in tiles, (ceil(M/16), ceil(K/32), 16, 32), zeros behind K (qt_quantize writes them so); what stands behind M
 * is read and never used. w: codes uint8 (N, K/2) with scale bytes uint8 (N, K/g) as in cpu_matmul.c, or, without
 * scales, bf16 values (N, K). y (M, N) and bias (N) fp32, bf16 or fp16, contiguous.
 * Products of bf16 are exact in fp32; the tile unit sums them in fp32, and takes numbers below 2^-126 for zero. The
 * order over K is fixed: a row of y does not depend on the other rows, nor on the threads.
 * A task decodes 32 rows of w at a time, in the order the tile unit wants, and multiplies up to CHUNK_M rows of x by them:
 * two tiles of x by two of w by step of K. Values of codes are looked up, in a row of a table for each scale byte: five
 * vector instructions for 32 of them. Moves: codes once per CHUNK_M rows of x, x from the second-level cache per task.
 * Up to FEW_M rows the decoding is what costs, and the operands change places: rows of w then lie in tiles as they are
 * decoded, and the few tiles of x are transposed instead, once. The sums are the same, bit for bit.
 * Where compiler, processor or system lack AMX, qt_amx_ready says no and the product is not to be called.
 * Does not: check arguments (ops.py does), own threads, keep state but a table that qt_values fills; it is the same on
 * every CPU, and tested there.
 * The tests are tests/test_cpu_amx.py.
 */
#include "cpu_common.h"

/* bf16 values of the sixteen codes times each scale byte, of E4M3 and of E8M0. */
static uint16_t VALUES[2][256][16] __attribute__((aligned(64)));

const uint16_t *qt_values(void) {
    static const float e2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    unsigned before = keep_small();
    for (int i = 0; i < 256; i++) {
        uint8_t byte[8] = {(uint8_t)i};
        float s[2][8];
        scale_values(byte, 1, 16, 1.0f, s[0]), scale_values(byte, 1, 32, 1.0f, s[1]);
        for (int c = 0; c < 16; c++) /* the upper halves are exact: the values have few bits */
            for (int f = 0; f < 2; f++) VALUES[f][i][c] = (uint16_t)(bits(e2m1[c] * s[f][0]) >> 16);
    }
    as_before(before);
    return VALUES[0][0];
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512VBMI__) && \
    defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE = 1024, PANEL = 32, CHUNK_M = 512, LEAST_M = 64, FEW_M = 32, AHEAD = 2, SPAN = 4, TILE_DATA = 18, REQUEST_PERMISSION = 0x1023 };

typedef struct {
    const Layer *l; const char *x; i64 m, tiles; /* tiles: steps of 32 along K */
    int few;                                     /* x is transposed, and w is not */
    const float *x_ts; i64 x_ts_step; char *y; i64 y_dtype, chunk;
    i64 panels, span, ahead; /* span: panels a task; ahead: how many panels off the one is that is fetched */
    _Atomic int *failed;
} Product;

typedef struct { uint8_t palette, row; uint8_t zeros[14]; uint16_t bytes[16]; uint8_t rows[16]; } Tiles;

static void take_tiles(void) {
    Tiles t = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    __asm__ volatile("" ::"r"(&t) : "memory");
    _tile_loadconfig(&t);
}

/* The system saves the tiles' eight kilobytes per thread for those alone that ask. */
int qt_amx_ready(void) {
    qt_values();
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* 32 codes, their scale bytes' rows of VALUES -> bf16 values. Two of a code's five table bits are where it stands. */
INLINE __m512i decode32(__m128i codes, const uint16_t *first, const uint16_t *second) {
    const __m512i from = _mm512_set1_epi64(0x0B0B070703033F3F); /* every nibble of four twice, one bit up */
    const __m512i place = _mm512_inserti64x4(_mm512_set1_epi16(0x0100), _mm256_set1_epi16(0x2120), 1);
    __m512i at = _mm512_multishift_epi64_epi8(from, _mm512_cvtepu16_epi64(codes));
    at = _mm512_ternarylogic_epi32(at, _mm512_set1_epi8(0x1E), place, 0xEA); /* (at & 0x1E) | place */
    __m512i table = _mm512_castsi256_si512(_mm256_load_si256((const __m256i *)first));
    return _mm512_permutexvar_epi8(at, _mm512_inserti64x4(table, _mm256_load_si256((const __m256i *)second), 1));
}

/* r[i] lane j <-> r[j] lane i, 32 bits each. */
INLINE void transpose16(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2)
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88), r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
}

/* The first `left` of 32 values of a row, whose codes (or values) and scale bytes begin here; zeros behind them. */
INLINE __m512i row32(const uint8_t *w, const uint8_t *s, i64 left, const int group) {
    if (!group) return _mm512_maskz_loadu_epi32((__mmask16)((1u << left / 2) - 1), w);
    const uint16_t(*values)[16] = VALUES[group == 32];
    __m128i codes = left == 32 ? _mm_loadu_si128((const __m128i *)w) : _mm_maskz_loadu_epi8((1u << left / 2) - 1, w);
    return decode32(codes, values[s[0]], values[group == 32 ? s[0] : left > 16 ? s[1] : 0]);
}

/* Step t of rows n0..n0+32 of w, as two tiles: rows of a tile are pairs of K, its columns rows of w; zeros behind K, and
 * the last row again behind N. `few`: rows of a tile are rows of w. Of the rows from `next` on, what lies in the same
 * place is fetched, since a CPU does not guess thirty-two streams. */
INLINE void pack_step(const Layer *l, i64 n0, i64 next, i64 t, const int few, const int group, char *out) {
    i64 row = group ? l->k / 2 : l->k * 2, step = group ? 16 : 64, groups = group ? l->k / group : 0, left = l->k - 32 * t;
    const uint8_t *w = l->codes + n0 * row + t * step, *s = l->scales + (group ? n0 * groups + 32 * t / group : 0);
    for (i64 i = 0; i < PANEL * step; i += 64) _mm_prefetch(l->codes + next * row + t * PANEL * step + i, _MM_HINT_T0);
    if (group) _mm_prefetch(l->scales + next * groups + t * PANEL * 32 / group, _MM_HINT_T0);
    for (i64 half = 0; half < 2; half++, out += TILE) {
        __m512i r[16];
        if (left >= 32 && n0 + PANEL <= l->n) {
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++, w += row, s += groups) r[i] = row32(w, s, 32, group);
        } else
            for (int i = 0; i < 16; i++) {
                r[i] = row32(w, s, MIN(left, 32), group);
                if (n0 + 16 * half + i + 1 < l->n) w += row, s += groups;
            }
        if (!few) transpose16(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_store_si512(out + 64 * i, r[i]);
    }
}

static void pack_panel(const Layer *l, i64 tiles, i64 n0, i64 next, char *out) {
    for (i64 t = 0; t < tiles; t++, out += 2 * TILE) {
        if (!l->scales) pack_step(l, n0, next, t, 0, 0, out);
        else if (l->group == 16) pack_step(l, n0, next, t, 0, 16, out);
        else pack_step(l, n0, next, t, 0, 32, out);
    }
}

/* c (32, 32): two tiles of x by two of w. */
static void multiply(const char *x0, const char *x1, const char *w, i64 tiles, float *c) {
    __asm__ volatile("" ::: "memory"); /* compilers do not know that tiles are loaded from memory */
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 t = 0; t < tiles; t++) {
        _tile_loadd(4, x0 + t * TILE, 64); _tile_loadd(6, w + 2 * t * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + (2 * t + 1) * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x1 + t * TILE, 64);
        _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 4 * PANEL); _tile_stored(1, c + 16, 4 * PANEL);
    _tile_stored(2, c + 16 * PANEL, 4 * PANEL); _tile_stored(3, c + 16 * PANEL + 16, 4 * PANEL);
    __asm__ volatile("" ::: "memory");
}

/* Rows n0..n0+32 of w times x transposed, into tiles 0 to 3. Decoding is AHEAD steps before the products, which wait for
 * one another and so cost next to nothing beside it. */
INLINE void multiply_few(const Product *p, i64 n0, i64 next, const int two, const int group) {
    char ring[2 * AHEAD][2 * TILE] __attribute__((aligned(64)));
    for (i64 t = -AHEAD; t < p->tiles; t++) {
        if (t + AHEAD < p->tiles) pack_step(p->l, n0, next, t + AHEAD, 1, group, ring[(t + AHEAD) % (2 * AHEAD)]);
        if (t < 0) continue;
        const char *w = ring[t % (2 * AHEAD)], *x = p->x + t * TILE;
        __asm__ volatile("" ::: "memory"); /* compilers do not know that tiles are loaded from memory */
        _tile_loadd(4, w, 64); _tile_loadd(5, w + TILE, 64); _tile_loadd(6, x, 64);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 5, 6);
        if (two) {
            _tile_loadd(7, x + p->tiles * TILE, 64);
            _tile_dpbf16ps(2, 4, 7); _tile_dpbf16ps(3, 5, 7);
        }
        __asm__ volatile("" ::: "memory");
    }
}

/* c (32, 32), rows m of it. */
static void panel_of_few(const Product *p, i64 n0, i64 next, float *c) {
    float turned[4][16 * 16] __attribute__((aligned(64)));
    const int two = p->m > 16, group = p->l->scales ? (int)p->l->group : 0;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    if (!group) multiply_few(p, n0, next, two, 0);
    else if (group == 16) multiply_few(p, n0, next, two, 16);
    else multiply_few(p, n0, next, two, 32);
    _tile_stored(0, turned[0], 64); _tile_stored(1, turned[1], 64);
    if (two) { _tile_stored(2, turned[2], 64); _tile_stored(3, turned[3], 64); }
    __asm__ volatile("" ::: "memory");
    for (int q = 0; q < (two ? 4 : 2); q++) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(turned[q] + 16 * i);
        transpose16(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(c + (q / 2 * 16 + i) * PANEL + q % 2 * 16, r[i]);
    }
}

static void transpose_tiles(const char *from, i64 count, char *to) {
    for (i64 t = 0; t < count; t++) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + t * TILE + 64 * i);
        transpose16(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + t * TILE + 64 * i, r[i]);
    }
}

static void finish_rows(const Product *p, float *c, i64 m0, i64 n0, const float *alpha, const float *bias) {
    i64 nn = MIN(PANEL, p->l->n - n0), size = p->y_dtype ? 2 : 4;
    for (i64 m = m0; m < MIN(p->m, m0 + 32); m++, c += PANEL) {
        float times = p->x_ts ? p->x_ts[m * p->x_ts_step] : 1.0f;
        for (int j = 0; j < PANEL; j++) c[j] = c[j] * (alpha[j] * times);
        if (p->l->bias) for (int j = 0; j < PANEL; j++) c[j] += bias[j];
        char *to = p->y + (m * p->l->n + n0) * size;
        if (nn == PANEL) store_row(c, (int)p->y_dtype, PANEL, to); /* a constant length is a few vectors */
        else store_row(c, (int)p->y_dtype, nn, to);
    }
}

/* Rows n0..n0+32 of w times rows m0..m0+chunk of x; `memory` for 32 decoded rows of w, but where rows of x are few. */
static void product_of_panel(const Product *p, i64 n0, i64 m0, char *memory) {
    i64 part = 0, next = MIN(n0 + p->ahead * PANEL, MAX(0, p->l->n - PANEL));
    float c[32 * PANEL] __attribute__((aligned(64))), alpha[PANEL] = {0}, bias[PANEL] = {0};
    for (i64 j = 0; j < MIN(PANEL, p->l->n - n0); j++) {
        while (n0 + j >= p->l->ends[part]) part++;
        alpha[j] = p->l->w_ts[part];
        if (p->l->bias) bias[j] = load_one(p->l->bias, (int)p->l->bias_dtype, n0 + j);
    }
    if (p->few) {
        panel_of_few(p, n0, next, c);
        finish_rows(p, c, 0, n0, alpha, bias);
        return;
    }
    pack_panel(p->l, p->tiles, n0, next, memory);
    for (i64 m = m0; m < MIN(p->m, m0 + p->chunk); m += 32) {
        const char *x0 = p->x + m / 16 * p->tiles * TILE;
        multiply(x0, m + 16 < p->m ? x0 + p->tiles * TILE : x0, memory, p->tiles, c);
        finish_rows(p, c, m, n0, alpha, bias);
    }
}

static void product_task(const void *ctx, i64 task) {
    const Product *p = ctx;
    i64 count = (p->panels + p->span - 1) / p->span, first = task % count * p->span;
    char *memory = p->few ? NULL : aligned_alloc(64, (size_t)(2 * TILE * p->tiles));
    if (!p->few && !memory) { atomic_store(p->failed, 1); return; }
    take_tiles();
    for (i64 i = first; i < MIN(first + p->span, p->panels); i++)
        product_of_panel(p, i * PANEL, task / count * p->chunk, memory);
    _tile_release();
    free(memory);
}

/* Returns 1 where there is no memory for 32 decoded rows of w. */
int qt_amx_matmul(const Layer *l, const void *x, const void *x_ts, i64 x_ts_step, i64 m, void *y, i64 y_dtype,
                  i64 threads) {
    _Atomic int failed = 0;
    i64 panels = (l->n + PANEL - 1) / PANEL, chunk = CHUNK_M;
    while (chunk > LEAST_M && panels * ((m + chunk - 1) / chunk) < 2 * threads) chunk /= 2;
    i64 tiles = (l->k + 31) / 32, all = (m + 15) / 16 * tiles;
    char *turned = m <= FEW_M ? aligned_alloc(64, (size_t)(all * TILE)) : NULL;
    if (turned) transpose_tiles(x, all, turned);
    /* Tiles are configured once a task. The next panel of a thread is the next but where each task has one alone. */
    i64 span = turned ? MAX(1, MIN(SPAN, panels / (4 * threads))) : 1, ahead = span > 1 ? 1 : threads;
    Product p = {l, turned ? turned : x, m, tiles, turned != NULL, x_ts, x_ts_step, y, y_dtype, chunk,
                 panels, span, ahead, &failed};
    run(product_task, &p, (panels + span - 1) / span * ((m + chunk - 1) / chunk), threads);
    free(turned);
    return atomic_load(&failed);
}

#else
int qt_amx_ready(void) { return 0; }
int qt_amx_matmul(const Layer *l, const void *x, const void *x_ts, i64 x_ts_step, i64 m, void *y, i64 y_dtype,
                  i64 threads) {
    (void)l, (void)x, (void)x_ts, (void)x_ts_step, (void)m, (void)y, (void)y_dtype, (void)threads;
    return 1;
}
#endif

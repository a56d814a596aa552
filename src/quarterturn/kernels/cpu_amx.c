/* Products of many rows on a CPU with AMX: 4-bit weights decoded into tiles, fp32 sums, the epilogue in the same pass.
 *
 *   y[m,n] = (sum_k x[m,k] * e2m1(w[n,k]) * w_scale[n,k/g]) * (w_tensor_scale[range of n] * x_tensor_scale[m])
 *            + bias[n]
 *
 * x: bf16 in tiles, (ceil(M/16), ceil(K/32), 16, 32), zeros behind K (qt_quantize writes them so); what stands behind M
 * is read and never used. w: codes uint8 (N, K/2) with scale bytes uint8 (N, K/g) as in cpu_matmul.c, or, without
 * scales, bf16 values (N, K). y (M, N) and bias (N) fp32, bf16 or fp16, contiguous.
 * Products of bf16 are exact in fp32; the tile unit sums them in fp32, and takes numbers below 2^-126 for zero. The
 * order over K is fixed: a row of y does not depend on the other rows, nor on the threads.
 * A task decodes 32 rows of w once, in the order the tile unit wants, and multiplies up to CHUNK_M rows of x by them:
 * two tiles of x by two of w by step of K. Moves: codes once per CHUNK_M rows of x, x from the second-level cache per task.
 * Up to FEW_M rows the decoding is what costs, and the operands change places: rows of w then lie in tiles as they are
 * decoded, and the few tiles of x are transposed instead, once. The sums are the same, bit for bit.
 * Where compiler, processor or system lack AMX, qt_amx_ready says no and the product is not to be called.
 * Does not: check arguments (ops.py does), own threads, keep state. The tests are tests/test_cpu_native.py.
 */
#include "cpu_common.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE = 1024, PANEL = 32, CHUNK_M = 512, LEAST_M = 64, FEW_M = 32, TILE_DATA = 18, REQUEST_PERMISSION = 0x1023 };

/* The system saves the tiles' eight kilobytes per thread for those alone that ask. */
int qt_amx_ready(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }

typedef struct {
    const Layer *l; const char *x; i64 m, tiles; /* tiles: steps of 32 along K */
    int few;                                     /* x is transposed, and w is not */
    const float *x_ts; i64 x_ts_step; char *y; i64 y_dtype, chunk;
    _Atomic int *failed;
} Product;

typedef struct { uint8_t palette, row; uint8_t zeros[14]; uint16_t bytes[16]; uint8_t rows[16]; } Tiles;

static void take_tiles(void) {
    Tiles t = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    __asm__ volatile("" ::"r"(&t) : "memory");
    _tile_loadconfig(&t);
}

/* 32 codes -> bf16 values: a table of the sixteen values times each of the two scales is looked up by the codes. */
INLINE __m512i decode32(const uint8_t *p, const float s[2], __mmask16 mask) {
    const __m512 e2m1 = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512i high = _mm512_setr_epi32( /* the upper halves of both tables' numbers */
        0x030001, 0x070005, 0x0B0009, 0x0F000D, 0x130011, 0x170015, 0x1B0019, 0x1F001D,
        0x230021, 0x270025, 0x2B0029, 0x2F002D, 0x330031, 0x370035, 0x3B0039, 0x3F003D);
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    __m512i lo = _mm512_castps_si512(_mm512_mul_ps(e2m1, _mm512_set1_ps(s[0])));
    __m512i hi = _mm512_castps_si512(_mm512_mul_ps(e2m1, _mm512_set1_ps(s[1])));
    __m512i table = _mm512_permutex2var_epi16(lo, high, hi); /* exact: the values have few bits */
    __m512i c = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, p));
    c = _mm512_and_si512(_mm512_or_si512(c, _mm512_slli_epi32(c, 12)), _mm512_set1_epi32(0x000F000F));
    return _mm512_permutexvar_epi16(_mm512_or_si512(c, second), table);
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

/* Rows n0..n0+32 of w, tile after tile: rows of a tile are pairs of K, its columns rows of w; zeros behind N and K.
 * `few`: rows of a tile are rows of w. `scale` has room for the values of 32 rows' scales. */
static void pack_panel(const Layer *l, i64 tiles, i64 n0, int few, float *scale, char *out) {
    i64 groups = l->scales ? l->k / l->group : 0, room = (groups + 7) / 8 * 8 + 8, nn = MIN(PANEL, l->n - n0);
    for (i64 j = 0; j < nn * !!l->scales; j++) {
        float *s = scale + j * room;
        if (l->group == 16) scale_values(l->scales + (n0 + j) * groups, groups, 16, 1.0f, s);
        else scale_values(l->scales + (n0 + j) * groups, groups, 32, 1.0f, s);
        s[groups] = 0.0f;
    }
    for (i64 t = 0; t < tiles; t++) {
        i64 left = MIN(32, l->k - 32 * t);
        __mmask16 mask = (__mmask16)((1u << left / 2) - 1);
        for (i64 half = 0; half < 2; half++) {
            __m512i r[16];
            for (i64 i = 0; i < 16; i++) {
                i64 j = 16 * half + i;
                if (j >= nn) r[i] = _mm512_setzero_si512();
                else if (!l->scales) r[i] = _mm512_maskz_loadu_epi32(mask, l->codes + ((n0 + j) * l->k + 32 * t) * 2);
                else {
                    const float *s = scale + j * room + (l->group == 16 ? 2 * t : t);
                    const float two[2] = {s[0], l->group == 16 ? s[1] : s[0]};
                    r[i] = decode32(l->codes + ((n0 + j) * l->k + 32 * t) / 2, two, mask);
                }
            }
            if (!few) transpose16(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(out + (2 * t + half) * TILE + 64 * i, r[i]);
        }
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

/* c (32, 32), rows m of it, by w times x transposed; x1: the tiles of rows 16 to 31, or none. */
static void multiply_few(const char *x0, const char *x1, const char *w, i64 tiles, float *c) {
    float turned[4][16 * 16] __attribute__((aligned(64)));
    __asm__ volatile("" ::: "memory");
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 t = 0; t < tiles; t++) {
        _tile_loadd(4, w + 2 * t * TILE, 64); _tile_loadd(5, w + (2 * t + 1) * TILE, 64);
        _tile_loadd(6, x0 + t * TILE, 64);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 5, 6);
        if (x1) {
            _tile_loadd(7, x1 + t * TILE, 64);
            _tile_dpbf16ps(2, 4, 7); _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, turned[0], 64); _tile_stored(1, turned[1], 64);
    _tile_stored(2, turned[2], 64); _tile_stored(3, turned[3], 64);
    __asm__ volatile("" ::: "memory");
    for (int q = 0; q < (x1 ? 4 : 2); q++) {
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

static void product_task(const void *ctx, i64 task) {
    const Product *p = ctx;
    i64 panels = (p->l->n + PANEL - 1) / PANEL, n0 = task % panels * PANEL, m0 = task / panels * p->chunk;
    i64 packed = 2 * TILE * p->tiles, scales = 4 * PANEL * (p->l->k / p->l->group + 16);
    char *w = aligned_alloc(64, (size_t)((packed + scales + 63) / 64 * 64));
    if (!w) { atomic_store(p->failed, 1); return; }
    float c[32 * PANEL] __attribute__((aligned(64))), alpha[PANEL] = {0}, bias[PANEL] = {0};
    i64 part = 0;
    for (i64 j = 0; j < MIN(PANEL, p->l->n - n0); j++) {
        while (n0 + j >= p->l->ends[part]) part++;
        alpha[j] = p->l->w_ts[part];
        if (p->l->bias) bias[j] = load_one(p->l->bias, (int)p->l->bias_dtype, n0 + j);
    }
    pack_panel(p->l, p->tiles, n0, p->few, (float *)(w + packed), w);
    take_tiles();
    for (i64 m = m0; m < MIN(p->m, m0 + p->chunk); m += 32) {
        const char *x0 = p->x + m / 16 * p->tiles * TILE;
        const char *x1 = m + 16 < p->m ? x0 + p->tiles * TILE : NULL;
        if (p->few) multiply_few(x0, x1, w, p->tiles, c);
        else multiply(x0, x1 ? x1 : x0, w, p->tiles, c);
        finish_rows(p, c, m, n0, alpha, bias);
    }
    _tile_release();
    free(w);
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
    Product p = {l, turned ? turned : x, m, tiles, turned != NULL, x_ts, x_ts_step, y, y_dtype, chunk, &failed};
    run(product_task, &p, panels * ((m + chunk - 1) / chunk), threads);
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

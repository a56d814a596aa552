/* Products with 4-bit weights on a CPU, and decoding them. C11, no headers but the compiler's.
 *
 *   y[m,n] = (sum_k xv[m,k] * e2m1(w[n,k]) * w_scale[n,k/g]) * (x_tensor_scale[m] * w_tensor_scale[range of n]) + bias[n]
 *
 * w: codes uint8 (N, K/2), even element in the low nibble, scale bytes uint8 (N, K/g) of E4M3 (g = 16) or E8M0 (g = 32).
 * x is codes and scale bytes of the same form (W4A4), or (M, K) fp32, bf16, fp16 rows (W4A16).
 * y (M, N) and bias (N) fp32, bf16 or fp16. All contiguous but the rows of a float x. K is a multiple of g (16 or 32).
 * W4A4: doubled e2m1 values are integers up to 12; eight products are summed as integers (exact), times both block
 * scales in fp32 (exact for E4M3), and summed over K in fp32. W4A16: fp32 products and sums, fused where the machine can.
 * The order over K is fixed: a row of y does not depend on the other rows, nor on the threads.
 * Moves: weights once per BLOCK_M rows of x. A tile of 4 weight rows is decoded into the cache and used by all of them.
 * Fast with AVX2 (the VNNI dot product where there is one); elsewhere plain C that compilers vectorize.
 * Does not: check arguments (ops.py does), own threads, keep state.
 */
#include "cpu_common.h"

enum { BLOCK_M = 32, ROWS = 4, CHUNKS = 32, FLOAT_CHUNKS = 8, TASK_N = 16, SPLIT = 1 << 18 }; /* SPLIT: products worth another thread */

/* 64 values of K: byte i holds values 2i (lo) and 2i+1 (hi), doubled; lane l of s is the scale of bytes 4l..4l+3. */
typedef struct { float s[8]; uint8_t lo[32], hi[32]; } WChunk;               /* bytes are 12 + doubled value */
typedef struct { float s[8]; int8_t lo[32], hi[32]; int32_t twelve[8]; } XChunk; /* twelve: 12 * the lane's sum */

typedef struct {
    const uint8_t *codes, *scales; i64 g, n, k;
} Matrix;

/* Bytes -> offset + doubled e2m1 of the low and of the high nibbles. */
INLINE void nibbles(const uint8_t *p, const int offset, void *lo, void *hi) {
#ifdef HAVE_AVX2
    const __m128i t = _mm_add_epi8(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
                                   _mm_set1_epi8((char)offset));
    const __m256i table = _mm256_broadcastsi128_si256(t), low = _mm256_set1_epi8(15);
    __m256i c = _mm256_loadu_si256((const __m256i *)p);
    _mm256_storeu_si256(lo, _mm256_shuffle_epi8(table, _mm256_and_si256(c, low)));
    _mm256_storeu_si256(hi, _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(c, 4), low)));
#else
    for (int i = 0; i < 64; i++) {
        uint8_t c = i < 32 ? p[i] & 15 : p[i - 32] >> 4, m = c & 7;
        int8_t v = (int8_t)(m + (m > 4 ? m - 4 : 0) + (m > 6 ? 2 : 0));
        ((int8_t *)(i < 32 ? lo : hi))[i & 31] = (int8_t)((c & 8 ? -v : v) + offset);
    }
#endif
}

/* Chunks c0..c0+count of a row: their scales into s, and the last one, where K ends in it, as codes that are zero
 * behind the end. Returns the codes; *whole is how many chunks of them are in memory, the one after is in `spare`. */
INLINE const uint8_t *row_chunks(const Matrix *w, i64 row, i64 c0, i64 count, const int g, float times, float *s,
                                 uint8_t spare[32], i64 *whole) {
    const uint8_t *p = w->codes + row * (w->k / 2) + c0 * 32;
    i64 values = MIN(count * 64, w->k - c0 * 64);
    *whole = values / 64;
    scale_values(w->scales + row * (w->k / g) + c0 * (64 / g), values / g, g, times, s);
    for (i64 i = values / g; i < count * (64 / g); i++) s[i] = 0.0f;
    if (*whole < count) {
        memset(spare, 0, 32);
        memcpy(spare, p + *whole * 32, (size_t)(values / 2 - *whole * 32));
    }
    return p;
}

/* The scales of one chunk, four of 16 values or two of 32, spread over its eight lanes. */
INLINE void spread(const float *s, const int g, float *lanes) {
    v8f v;
    memcpy(&v, s, 32);
    v = g == 16 ? SHUFFLE8(v, 0, 0, 1, 1, 2, 2, 3, 3) : SHUFFLE8(v, 0, 0, 0, 0, 1, 1, 1, 1);
    memcpy(lanes, &v, 32);
}

INLINE void decode_integers(const Matrix *w, i64 row, i64 c0, i64 count, const int g, WChunk *out) {
    float s[CHUNKS * 4 + 8];
    uint8_t spare[32];
    i64 whole;
    const uint8_t *p = row_chunks(w, row, c0, count, g, 1.0f, s, spare, &whole);
    for (i64 c = 0; c < count; c++) {
        __builtin_prefetch(p + 32 * c + ROWS * (w->k / 2)); /* the next tile: short runs per row outwit the hardware's */
        nibbles(c < whole ? p + 32 * c : spare, 12, out[c].lo, out[c].hi);
        spread(s + c * (64 / g), g, out[c].s);
    }
}

INLINE void decode_activations(const Matrix *x, i64 row, i64 chunks, const int g, XChunk *out) {
    float s[4 + 8];
    uint8_t spare[32];
    for (i64 c = 0; c < chunks; c++) {
        i64 whole;
        const uint8_t *p = row_chunks(x, row, c, 1, g, 0.25f, s, spare, &whole); /* both operands are doubled */
        nibbles(whole ? p : spare, 0, out[c].lo, out[c].hi);
        spread(s, g, out[c].s);
        for (int l = 0; l < 8; l++) {
            int32_t sum = 0;
            for (int b = 4 * l; b < 4 * l + 4; b++) sum += out[c].lo[b] + out[c].hi[b];
            out[c].twelve[l] = 12 * sum;
        }
    }
}

/* 64 values of a chunk in their order; s holds half the scales of their groups. */
INLINE void decode64(const uint8_t *p, const float *s, const int g, float *out) {
#ifdef HAVE_AVX2
    __m256i lo, hi;
    nibbles(p, 0, &lo, &hi);
    __m256i even = _mm256_unpacklo_epi8(lo, hi), odd = _mm256_unpackhi_epi8(lo, hi);
    __m128i parts[4] = {_mm256_castsi256_si128(even), _mm256_castsi256_si128(odd), _mm256_extracti128_si256(even, 1),
                        _mm256_extracti128_si256(odd, 1)};
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i wide = _mm256_cvtepi8_epi32(i & 1 ? _mm_srli_si128(parts[i / 2], 8) : parts[i / 2]);
        _mm256_storeu_ps(out + 8 * i, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(s[8 * i / g])));
    }
#else
    int8_t lo[32], hi[32], v[64];
    nibbles(p, 0, lo, hi);
    for (int i = 0; i < 32; i++) v[2 * i] = lo[i], v[2 * i + 1] = hi[i];
    for (int i = 0; i < 64; i++) out[i] = (float)v[i] * s[i / g];
#endif
}

INLINE void decode_floats(const Matrix *w, i64 row, i64 c0, i64 count, const int g, float *out) {
    float s[FLOAT_CHUNKS * 4 + 8];
    uint8_t spare[32];
    i64 whole;
    const uint8_t *p = row_chunks(w, row, c0, count, g, 0.5f, s, spare, &whole);
    for (i64 c = 0; c < count; c++) {
        __builtin_prefetch(p + 32 * c + ROWS * (w->k / 2));
        decode64(c < whole ? p + 32 * c : spare, s + c * (64 / g), g, out + 64 * c);
    }
}

INLINE v8f dot_chunk(const WChunk *w, const XChunk *x, v8f acc) {
    v8f xs, ws;
    memcpy(&xs, x->s, 32), memcpy(&ws, w->s, 32);
#ifdef HAVE_AVX2
    __m256i twelve = _mm256_loadu_si256((const __m256i *)x->twelve);
    __m256i wl = _mm256_loadu_si256((const __m256i *)w->lo), wh = _mm256_loadu_si256((const __m256i *)w->hi);
    __m256i xl = _mm256_loadu_si256((const __m256i *)x->lo), xh = _mm256_loadu_si256((const __m256i *)x->hi);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    __m256i d = _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(_mm256_setzero_si256(), wl, xl), wh, xh);
#else
    __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(wl, xl), _mm256_maddubs_epi16(wh, xh));
    __m256i d = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
    v8f sum = (v8f)_mm256_cvtepi32_ps(_mm256_sub_epi32(d, twelve));
#else
    v8f sum;
    for (int l = 0; l < 8; l++) {
        int32_t d = -x->twelve[l];
        for (int b = 4 * l; b < 4 * l + 4; b++) d += w->lo[b] * x->lo[b] + w->hi[b] * x->hi[b];
        sum[l] = (float)d;
    }
#endif
    return FMA8(sum * xs, ws, acc);
}

typedef struct {
    Matrix w; const Layer *l; i64 m; const XChunk *xi; const float *xf; /* one of them, K padded to 64 */
    const float *x_ts; i64 x_ts_step; void *y; i64 y_dtype;
} Gemm;

INLINE void dot64(const float *w, const float *x, v8f acc[2]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        v8f wv, xv;
        memcpy(&wv, w + 8 * i, 32), memcpy(&xv, x + 8 * i, 32);
        acc[i & 1] = FMA8(wv, xv, acc[i & 1]);
    }
}

INLINE float lane_sum(v8f a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

static void finish(const Gemm *g, i64 m, i64 n, float acc) {
    i64 p = 0;
    while (n >= g->l->ends[p]) p++;
    float alpha = g->x_ts ? g->l->w_ts[p] * g->x_ts[m * g->x_ts_step] : g->l->w_ts[p];
    float y = acc * alpha;
    if (g->l->bias) y += load_one(g->l->bias, (int)g->l->bias_dtype, n);
    store_one(y, (int)g->y_dtype, m * g->w.n + n, g->y);
}

/* One row of x: every decoded chunk is used once, in registers; the operations are those of the tiles below. */
INLINE void one_row(const Gemm *g, i64 m, i64 n0, i64 nn, const int group, const int integers) {
    v8f acc[ROWS][2];
    i64 chunks = (g->w.k + 63) / 64, whole;
    memset(acc, 0, sizeof acc);
    for (i64 c0 = 0; c0 < chunks; c0 += CHUNKS) {
        i64 count = MIN(CHUNKS, chunks - c0);
        float s[ROWS][CHUNKS * 4 + 8];
        uint8_t spare[ROWS][32];
        const uint8_t *p[ROWS];
        for (i64 j = 0; j < ROWS; j++)
            p[j] = row_chunks(&g->w, n0 + MIN(j, nn - 1), c0, count, group, integers ? 1.0f : 0.5f, s[j], spare[j], &whole);
        for (i64 c = 0; c < count; c++)
            for (int j = 0; j < ROWS; j++) {
                const uint8_t *codes = c < whole ? p[j] + 32 * c : spare[j];
                const float *scale = s[j] + c * (64 / group);
                __builtin_prefetch(p[j] + 32 * c + ROWS * (g->w.k / 2));
                if (integers) {
                    WChunk w;
                    nibbles(codes, 12, w.lo, w.hi);
                    spread(scale, group, w.s);
                    acc[j][0] = dot_chunk(&w, g->xi + m * chunks + c0 + c, acc[j][0]);
                } else {
                    float w[64];
                    decode64(codes, scale, group, w);
                    dot64(w, g->xf + (m * chunks + c0 + c) * 64, acc[j]);
                }
            }
    }
    for (i64 j = 0; j < nn; j++) /* a zero that is added would make +0 of -0, and the tiles of integers add none */
        finish(g, m, n0 + j, lane_sum(integers ? acc[j][0] : acc[j][0] + acc[j][1]));
}

static void one_row_of(const Gemm *g, i64 m, i64 n0, i64 nn) {
    if (g->xi && g->w.g == 16) one_row(g, m, n0, nn, 16, 1);
    else if (g->xi) one_row(g, m, n0, nn, 32, 1);
    else if (g->w.g == 16) one_row(g, m, n0, nn, 16, 0);
    else one_row(g, m, n0, nn, 32, 0);
}

INLINE void integer_tile(const Gemm *g, i64 m0, i64 mm, i64 n0, i64 nn, const int group) {
    WChunk w[ROWS][CHUNKS] __attribute__((aligned(32)));
    v8f acc[BLOCK_M][ROWS];
    i64 chunks = (g->w.k + 63) / 64;
    memset(acc, 0, (size_t)mm * sizeof acc[0]);
    for (i64 c0 = 0; c0 < chunks; c0 += CHUNKS) {
        i64 count = MIN(CHUNKS, chunks - c0);
        for (i64 j = 0; j < ROWS; j++) decode_integers(&g->w, n0 + MIN(j, nn - 1), c0, count, group, w[j]);
        for (i64 m = 0; m < mm; m++) {
            const XChunk *x = g->xi + (m0 + m) * chunks + c0;
            v8f a0 = acc[m][0], a1 = acc[m][1], a2 = acc[m][2], a3 = acc[m][3];
            for (i64 c = 0; c < count; c++) {
                a0 = dot_chunk(&w[0][c], x + c, a0), a1 = dot_chunk(&w[1][c], x + c, a1);
                a2 = dot_chunk(&w[2][c], x + c, a2), a3 = dot_chunk(&w[3][c], x + c, a3);
            }
            acc[m][0] = a0, acc[m][1] = a1, acc[m][2] = a2, acc[m][3] = a3;
        }
    }
    for (i64 m = 0; m < mm; m++)
        for (i64 j = 0; j < nn; j++) finish(g, m0 + m, n0 + j, lane_sum(acc[m][j]));
}

INLINE void float_tile(const Gemm *g, i64 m0, i64 mm, i64 n0, i64 nn, const int group) {
    float w[ROWS][FLOAT_CHUNKS * 64] __attribute__((aligned(32)));
    v8f acc[BLOCK_M][ROWS][2];
    i64 chunks = (g->w.k + 63) / 64;
    memset(acc, 0, (size_t)mm * sizeof acc[0]);
    for (i64 c0 = 0; c0 < chunks; c0 += FLOAT_CHUNKS) {
        i64 count = MIN(FLOAT_CHUNKS, chunks - c0);
        for (i64 j = 0; j < ROWS; j++) decode_floats(&g->w, n0 + MIN(j, nn - 1), c0, count, group, w[j]);
        for (i64 m = 0; m < mm; m++) {
            const float *x = g->xf + ((m0 + m) * chunks + c0) * 64;
            v8f a[ROWS][2];
            memcpy(a, acc[m], sizeof a);
            for (i64 i = 0; i < 64 * count; i += 16)
                for (int h = 0; h < 2; h++) {
                    v8f xv, wv;
                    memcpy(&xv, x + i + 8 * h, 32);
                    for (int j = 0; j < ROWS; j++) memcpy(&wv, w[j] + i + 8 * h, 32), a[j][h] = FMA8(wv, xv, a[j][h]);
                }
            memcpy(acc[m], a, sizeof a);
        }
    }
    for (i64 m = 0; m < mm; m++)
        for (i64 j = 0; j < nn; j++) finish(g, m0 + m, n0 + j, lane_sum(acc[m][j][0] + acc[m][j][1]));
}

static void gemm_task(const void *ctx, i64 task) {
    const Gemm *g = ctx;
    i64 tasks_n = (g->w.n + TASK_N - 1) / TASK_N, m0 = task / tasks_n * BLOCK_M, first = task % tasks_n * TASK_N;
    i64 last = MIN(g->w.n, first + TASK_N), mm = MIN(BLOCK_M, g->m - m0);
    for (i64 n = first; n < last; n += ROWS) {
        i64 nn = MIN(ROWS, last - n);
        if (mm == 1) one_row_of(g, m0, n, nn);
        else if (g->xi && g->w.g == 16) integer_tile(g, m0, mm, n, nn, 16);
        else if (g->xi) integer_tile(g, m0, mm, n, nn, 32);
        else if (g->w.g == 16) float_tile(g, m0, mm, n, nn, 16);
        else float_tile(g, m0, mm, n, nn, 32);
    }
}

typedef struct { Matrix x; i64 x_dtype, x_stride, chunks, row; char *out; } Unpack;

/* Rows of x as the product reads them: codes as integers, floats as fp32, K padded to 64 with zeros. */
static void unpack_task(const void *ctx, i64 task) {
    const Unpack *u = ctx;
    i64 k = u->x.k;
    for (i64 i = task * BLOCK_M; i < MIN(u->x.n, (task + 1) * BLOCK_M); i++) {
        float *to = (float *)(u->out + i * u->row);
        if (u->x_dtype < 0) {
            if (u->x.g == 16) decode_activations(&u->x, i, u->chunks, 16, (XChunk *)to);
            else decode_activations(&u->x, i, u->chunks, 32, (XChunk *)to);
            continue;
        }
        load_row((const char *)u->x.codes + i * u->x_stride * (u->x_dtype ? 2 : 4), (int)u->x_dtype, k, to);
        memset(to + k, 0, (size_t)(u->chunks * 64 - k) * 4);
    }
}

/* x_dtype -1: x is codes with x_scales. Returns 1 where there is no memory for x. */
int qt_matmul(const Layer *l, const void *x, i64 x_dtype, i64 x_stride, const void *x_scales, const void *x_ts,
              i64 x_ts_step, i64 m, void *y, i64 y_dtype, i64 threads) {
    i64 n = l->n, k = l->k, chunks = (k + 63) / 64, row = chunks * (x_dtype < 0 ? (i64)sizeof(XChunk) : 256);
    char *memory = aligned_alloc(64, (size_t)(m * row + 64) / 64 * 64);
    if (!memory) return 1;
    Unpack u = {{x, x_scales, l->group, m, k}, x_dtype, x_stride, chunks, row, memory};
    run(unpack_task, &u, (m + BLOCK_M - 1) / BLOCK_M, threads);
    Gemm g = {{l->codes, l->scales, l->group, n, k}, l, m, x_dtype < 0 ? (XChunk *)memory : NULL, (float *)memory,
              x_ts, x_ts_step, y, y_dtype};
    run(gemm_task, &g, (m + BLOCK_M - 1) / BLOCK_M * ((n + TASK_N - 1) / TASK_N), MIN(threads, 1 + m * n * k / SPLIT));
    free(memory);
    return 0;
}

typedef struct { Matrix w; char *out; i64 dtype; } Decode;

static void decode_task(const void *ctx, i64 task) {
    const Decode *d = ctx;
    i64 k = d->w.k, size = d->dtype ? 2 : 4;
    for (i64 row = task * TASK_N; row < MIN(d->w.n, (task + 1) * TASK_N); row++)
        for (i64 c = 0; c < (k + 63) / 64; c += FLOAT_CHUNKS) {
            float v[FLOAT_CHUNKS * 64];
            i64 count = MIN(FLOAT_CHUNKS, (k + 63) / 64 - c);
            if (d->w.g == 16) decode_floats(&d->w, row, c, count, 16, v);
            else decode_floats(&d->w, row, c, count, 32, v);
            store_row(v, (int)d->dtype, MIN(FLOAT_CHUNKS * 64, k - c * 64), d->out + (row * k + c * 64) * size);
        }
}

/* (n, k) values e2m1 * scale, exact in fp32 and bf16, and in fp16 for E4M3 scales. */
void qt_decode(const void *codes, const void *scales, i64 group, i64 n, i64 k, void *out, i64 dtype,
               i64 threads) {
    Decode d = {{codes, scales, group, n, k}, out, dtype};
    run(decode_task, &d, (n + TASK_N - 1) / TASK_N, threads);
}

/* Whole layers that read the same few rows x, all of one input side, each with an output (M, N) of its own: x is rotated
 * and quantized (or, format -1, rotated and rounded to its own dtype) once, with the first layer's parameters. tiled: it
 * becomes bf16 tiles, for the products of cpu_amx.c. */
int qt_linear(const Layer *const *layers, i64 count, const void *x, i64 x_dtype, i64 x_stride, i64 m, void *const *y,
              i64 y_dtype, i64 tiled, i64 threads) {
    const Layer *l = layers[0];
    i64 quantized = l->format >= 0, k = l->k, groups = quantized ? k / l->group : 0, size = x_dtype ? 2 : 4;
    i64 tiles = tiled ? (m + 15) / 16 * ((k + 31) / 32) * 1024 : 0, beside = m * (quantized ? k / 2 + groups : k * size);
    char *memory = aligned_alloc(64, (size_t)(tiles + 4 * m + (tiled ? 0 : beside) + 128) / 64 * 64);
    if (!memory) return 1;
    float *x_ts = (float *)(memory + tiles);
    uint8_t *z = (uint8_t *)(x_ts + m + 1), *x_scales = z + m * k / 2; /* even no rows have one scale */
    int failed = 0, turned = quantized || l->R;
    if (tiled) failed = qt_quantize(l, x, x_dtype, x_stride, m, x_ts, NULL, NULL, memory, 1, 1, threads);
    else if (quantized) failed = qt_quantize(l, x, x_dtype, x_stride, m, x_ts, z, x_scales, NULL, 0, 0, threads);
    else if (turned) failed = qt_quantize(l, x, x_dtype, x_stride, m, x_ts, NULL, NULL, z, x_dtype, 0, threads);
    for (i64 i = 0; i < count && !failed; i++)
        failed = tiled ? qt_amx_matmul(layers[i], memory, quantized ? x_ts : NULL, l->token, m, y[i], y_dtype, threads)
                       : qt_matmul(layers[i], turned ? z : x, quantized ? -1 : x_dtype, turned ? k : x_stride,
                                   quantized ? x_scales : NULL, quantized ? x_ts : NULL, l->token, m, y[i], y_dtype, threads);
    free(memory);
    return failed;
}

/* Rotate and quantize activations on a CPU, in one pass over each row. C11, no headers but the compiler's.
 *
 *   z     = factor * (x @ T) per block of R, in double, rounded once to fp32
 *   NVFP4   s = E4M3(min(encode * (amax * fp32(1/6)), 448));  r = 1 / (s * fp32(1/encode));  code = E2M1(z * r)
 *   MXFP4   s = 2^e by the caller's rule;                                                    code = E2M1(z * 2^-e)
 *
 * x (rows, K) fp32, bf16 or fp16, rows may be strided; K is a multiple of R and of the group (16 or 32).
 * Out, contiguous: codes uint8 (rows, K/2), even element in the low nibble, with scale bytes (rows, K/group); or values
 * (rows, K) e2m1 * s; or (format -1) z itself; values stand in rows, or as bf16 in the tiles of cpu_amx.c.
 * tensor_scale fp32 (1), or (rows) where each row has its own encode.
 * Every fp32 step is one IEEE operation in the order above: build with -ffp-contract=off and without -ffast-math. z is
 * summed in double in a fixed order, exactly where T is +-1 and x is bf16 of common range. No row looks at another.
 * A group with NaN or Inf gets the NaN scale byte and codes 0; a group whose scale is 0 has codes 0, and so has one of
 * zeros.
 * Moves: x in once, codes and scales (0.5625 byte a value) or values out once; a row stays in the cache between steps.
 * Does not: check arguments (ops.py does), own threads, keep state but the pool's entry.
 * The specification is reference.py, the tests are tests/test_cpu_native.py.
 */
#include "cpu_common.h"

void (*qt_pool)(void (*)(void *), void *, unsigned, unsigned);

void qt_set_pool(void *entry) { memcpy(&qt_pool, &entry, sizeof qt_pool); }

/* ---- rotation of one row in place ---- */

#ifdef HAVE_AVX512
/* 16 values times the Sylvester matrix, strides 1, 2, 4, 8: a + b in the lower of a pair of lanes, a - b in the upper. */
INLINE void hadamard16(const float *x, const float *sign, __m512d o[2]) {
    const __m512d s1 = _mm512_setr_pd(1, -1, 1, -1, 1, -1, 1, -1), s2 = _mm512_setr_pd(1, 1, -1, -1, 1, 1, -1, -1);
    const __m512d s4 = _mm512_setr_pd(1, 1, 1, 1, -1, -1, -1, -1);
    __m512d v[2];
    for (int i = 0; i < 2; i++) {
        __m512d a = _mm512_cvtps_pd(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_loadu_ps(sign + 8 * i)));
        a = _mm512_fmadd_pd(a, s1, _mm512_permute_pd(a, 0x55));
        a = _mm512_fmadd_pd(a, s2, _mm512_permutex_pd(a, 0x4E));
        v[i] = _mm512_fmadd_pd(a, s4, _mm512_shuffle_f64x2(a, a, 0x4E));
    }
    o[0] = _mm512_add_pd(v[0], v[1]), o[1] = _mm512_sub_pd(v[0], v[1]);
}

/* z = diag(sign) H diag(factor) per block; R a power of two >= 16, factor holds the signs of the columns too. */
INLINE void hadamard_row(float *z, i64 k, const float *sign, const double *factor, const i64 R, void *memory) {
    __m512d registers[2], *buf = R == 16 ? registers : memory;
    for (i64 base = 0; base < k; base += R) {
        for (i64 i = 0; i < R; i += 16) hadamard16(z + base + i, sign + i, buf + i / 8);
        for (i64 h = 2; h < R / 8; h *= 2)
            for (i64 i = 0; i < R / 8; i += 2 * h)
                for (i64 j = i; j < i + h; j++) {
                    __m512d a = buf[j], b = buf[j + h];
                    buf[j] = a + b, buf[j + h] = a - b;
                }
        for (i64 i = 0; i < R / 8; i++) { /* a zero is +0, whatever the signs of its factors */
            __m512d out = _mm512_fmadd_pd(buf[i], _mm512_loadu_pd(factor + 8 * i), _mm512_setzero_pd());
            _mm256_storeu_ps(z + base + 8 * i, _mm512_cvtpd_ps(out));
        }
    }
}
#else
/* 16 values times the Sylvester matrix: strides 1 and 2 run across registers because x is read transposed. */
INLINE void hadamard16(const float *x, const float *sign, v4d o[4]) {
    v4f r[4];
    for (int i = 0; i < 4; i++) {
        v4f s;
        memcpy(&r[i], x + 4 * i, 16), memcpy(&s, sign + 4 * i, 16);
        r[i] *= s;
    }
    v4f a = SHUFFLE(r[0], r[1], 0, 4, 1, 5), b = SHUFFLE(r[0], r[1], 2, 6, 3, 7);
    v4f c = SHUFFLE(r[2], r[3], 0, 4, 1, 5), d = SHUFFLE(r[2], r[3], 2, 6, 3, 7);
    v4d x0 = WIDEN(SHUFFLE(a, c, 0, 1, 4, 5));
    v4d x1 = WIDEN(SHUFFLE(a, c, 2, 3, 6, 7));
    v4d x2 = WIDEN(SHUFFLE(b, d, 0, 1, 4, 5));
    v4d x3 = WIDEN(SHUFFLE(b, d, 2, 3, 6, 7));
    v4d p0 = x0 + x1, p1 = x0 - x1, p2 = x2 + x3, p3 = x2 - x3;
    v4d q0 = p0 + p2, q1 = p1 + p3, q2 = p0 - p2, q3 = p1 - p3;
    v4d t0 = SHUFFLED(q0, q1, 0, 4, 2, 6), t1 = SHUFFLED(q0, q1, 1, 5, 3, 7);
    v4d t2 = SHUFFLED(q2, q3, 0, 4, 2, 6), t3 = SHUFFLED(q2, q3, 1, 5, 3, 7);
    x0 = SHUFFLED(t0, t2, 0, 1, 4, 5), x1 = SHUFFLED(t1, t3, 0, 1, 4, 5);
    x2 = SHUFFLED(t0, t2, 2, 3, 6, 7), x3 = SHUFFLED(t1, t3, 2, 3, 6, 7);
    p0 = x0 + x1, p1 = x0 - x1, p2 = x2 + x3, p3 = x2 - x3;
    o[0] = p0 + p2, o[1] = p1 + p3, o[2] = p0 - p2, o[3] = p1 - p3;
}

/* z = diag(sign) H diag(factor) per block; R a power of two >= 16, factor holds the signs of the columns too. */
INLINE void hadamard_row(float *z, i64 k, const float *sign, const double *factor, const i64 R, void *memory) {
    v4d registers[4], *buf = R == 16 ? registers : memory;
    for (i64 base = 0; base < k; base += R) {
        for (i64 i = 0; i < R; i += 16) hadamard16(z + base + i, sign + i, buf + i / 4);
        for (i64 h = 4; h < R / 4; h *= 2)
            for (i64 i = 0; i < R / 4; i += 2 * h)
                for (i64 j = i; j < i + h; j++) {
                    v4d a = buf[j], b = buf[j + h];
                    buf[j] = a + b, buf[j + h] = a - b;
                }
        for (i64 i = 0; i < R / 4; i++) {
            v4d f;
            memcpy(&f, factor + 4 * i, 32);
            v4f out = NARROW(buf[i] * f + (v4d){0}); /* a zero is +0, whatever the signs of its factors */
            memcpy(z + base + 4 * i, &out, 16);
        }
    }
}
#endif

/* Any matrix: four blocks by eight columns in registers. t is (R, R8), R8 = R rounded up to 8, zeros behind R. */
static void matrix_row(float *z, i64 k, const double *t, double factor, i64 R, double *buf) {
    i64 R8 = (R + 7) / 8 * 8, blocks = k / R;
    for (i64 b0 = 0; b0 < blocks; b0 += 4) {
        i64 nb = MIN(4, blocks - b0);
        for (i64 i = 0; i < nb * R; i++) buf[i] = (double)z[b0 * R + i];
        for (i64 i = nb * R; i < 4 * R; i++) buf[i] = 0.0;
        for (i64 j0 = 0; j0 < R8; j0 += 8) {
            v4d acc[4][2] = {{{0}}};
            for (i64 i = 0; i < R; i++) {
                v4d lo, hi;
                memcpy(&lo, t + i * R8 + j0, 32), memcpy(&hi, t + i * R8 + j0 + 4, 32);
                for (int b = 0; b < 4; b++) {
                    v4d v = buf[b * R + i] - (v4d){0};
                    acc[b][0] = FMA(v, lo, acc[b][0]), acc[b][1] = FMA(v, hi, acc[b][1]);
                }
            }
            for (i64 b = 0; b < nb; b++) {
                v4f out[2] = {NARROW(acc[b][0] * factor + (v4d){0}), NARROW(acc[b][1] * factor + (v4d){0})};
                float *to = z + (b0 + b) * R + j0;
                if (j0 + 8 <= R) memcpy(to, out, 32);
                else memcpy(to, out, (size_t)(R - j0) * 4);
            }
        }
    }
}

/* ---- quantization of one row ---- */

typedef struct {
    const Layer *l; const char *x; i64 x_dtype, x_stride, rows, k;
    float *tensor_scale; uint8_t *codes, *scales; void *values; i64 v_dtype, tiled, rows_per_task;
    _Atomic int *failed;
} Quant;

/* Largest magnitude of each group, as bits: they order as the magnitudes do, with Inf and NaN above all numbers.
 * Sixteen groups at a time; z is padded with zeros to that. */
#ifdef HAVE_AVX512
INLINE __m512i larger(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
INLINE __m512i magnitudes(const float *z, const int g) {
    const __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i a = _mm512_and_si512(_mm512_loadu_si512(z), mask);
    return g == 16 ? a : larger(a, _mm512_and_si512(_mm512_loadu_si512(z + 16), mask));
}

INLINE void group_amax(const float *z, i64 groups, const int g, uint32_t *restrict amax) {
    for (i64 i = 0; i < groups; i += 16, z += 16 * g) {
        __m512i q[4]; /* every lane of 128 bits: what is left of the groups i + j, i + 4 + j, i + 8 + j, i + 12 + j */
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m512i a = magnitudes(z + j * g, g), b = magnitudes(z + (4 + j) * g, g);
            __m512i c = magnitudes(z + (8 + j) * g, g), d = magnitudes(z + (12 + j) * g, g);
            a = larger(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            c = larger(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            q[j] = larger(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
        }
        __m512i a = larger(_mm512_shuffle_i32x4(q[0], q[1], 0x44), _mm512_shuffle_i32x4(q[0], q[1], 0xEE));
        __m512i b = larger(_mm512_shuffle_i32x4(q[2], q[3], 0x44), _mm512_shuffle_i32x4(q[2], q[3], 0xEE));
        a = larger(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_storeu_si512(amax + i, _mm512_permutexvar_epi32(order, a));
    }
}
#else
INLINE void group_amax(const float *z, i64 groups, const int g, uint32_t *restrict amax) {
    for (i64 i = 0; i < groups; i += 4) {
        v4i m[4];
        for (int b = 0; b < 4; b++) {
            m[b] = (v4i){0};
            for (int j = 0; j < g; j += 4) {
                v4i a;
                memcpy(&a, z + (i + b) * g + j, 16);
                m[b] = VMAX(m[b], a & 0x7FFFFFFF);
            }
        }
        v4i p = VMAX(SHUFFLE(m[0], m[1], 0, 4, 1, 5), SHUFFLE(m[0], m[1], 2, 6, 3, 7));
        v4i q = VMAX(SHUFFLE(m[2], m[3], 0, 4, 1, 5), SHUFFLE(m[2], m[3], 2, 6, 3, 7));
        p = VMAX(SHUFFLE(p, q, 0, 1, 4, 5), SHUFFLE(p, q, 2, 3, 6, 7));
        memcpy(amax + i, &p, 16);
    }
}
#endif

static void nvfp4_scales(const uint32_t *restrict amax, i64 n, float encode, float tensor_scale, float *restrict s,
                         float *restrict r, uint8_t *restrict byte) {
    for (i64 i = 0; i < n; i++) {
        float v = encode * (real(amax[i]) * 0x1.555556p-3f);
        v = v < 448.0f ? v : 448.0f;
        uint32_t u = bits(v), n3 = u + 0x7FFFFu + (u >> 20 & 1); /* round to three mantissa bits, ties to even */
        float t = v + 24576.0f;                                  /* below 2^-6: to multiples of 2^-9 */
        uint32_t code = v < 0x1p-6f ? bits(t) - 0x46C00000u : (n3 >> 20) - 960u;
        float sv = v < 0x1p-6f ? t - 24576.0f : real(n3 & 0xFFF00000u);
        float rv = 1.0f / (sv * tensor_scale);
        rv = rv < FLT_MAX ? rv : FLT_MAX;
        rv = sv > 0.0f ? rv : 0.0f;
        r[i] = amax[i] < 0x7F800000u ? rv : 0.0f;
        s[i] = amax[i] < 0x7F800000u ? sv : real(0x7FC00000u);
        byte[i] = (uint8_t)(amax[i] < 0x7F800000u ? code : 0x7Fu);
    }
}

static void mxfp4_scales(const uint32_t *restrict amax, i64 n, uint32_t rule, float *restrict s, float *restrict r,
                         uint8_t *restrict byte) {
    for (i64 i = 0; i < n; i++) {
        int32_t e = (int32_t)(amax[i] >> 23) + ((amax[i] & 0x7FFFFFu) > rule) - 2;
        e = e > 0 ? e : 0;
        int bad = amax[i] >= 0x7F800000u;
        r[i] = bad | (amax[i] == 0) ? 0.0f : real((uint32_t)(254 - e) << 23);
        s[i] = real(bad ? 0x7FC00000u : e ? (uint32_t)e << 23 : 0x400000u);
        byte[i] = (uint8_t)(bad ? 255 : e);
    }
}

/* |v| rounded to E2M1 as q (a value) or as the low three bits of the result (a code): the step 0.5, 1 or 2 is half the
 * power of two p below max(|v|, 1), and adding 1.5 * 2^22 * p rounds to that step, ties to even. */
INLINE v8i e2m1_round(v8f v, v8f *q) {
    v8i a = VMIN8((v8i)v & 0x7FFFFFFF, (v8i){0} + 0x40C00000); /* magnitudes compare as their bits; saturates at 6 */
    v8i p = VMAX8(a, (v8i){0} + 0x3F800000) & 0x7F800000;
    v8f big = (v8f)(p + 0x0B400000), t = (v8f)a + big;
    *q = t - big;
    return (v8i)t + (v8i)((v8u)p >> 22) + 2;
}

/* z becomes its codes, 32 bits each. */
INLINE void group_codes(float *z, i64 groups, const int g, const float *r) {
    for (i64 i = 0; i < groups; i++)
        for (int j = 0; j < g; j += 8) {
            v8f v, q;
            memcpy(&v, z + i * g + j, 32);
            v *= r[i];
            v8i c = ((e2m1_round(v, &q) & 7) | ((v8i)((v8u)v >> 28) & 8)) & (bits(r[i]) ? 15 : 0);
            memcpy(z + i * g + j, &c, 32);
        }
}

/* z becomes e2m1 * s. */
#ifdef HAVE_AVX512
INLINE void group_values(float *z, i64 groups, const int g, const float *r, const float *s) {
    const __m512i six = _mm512_set1_epi32(0x40C00000), one = _mm512_set1_epi32(0x3F800000);
    for (i64 i = 0; i < groups; i++)
        for (int j = 0; j < g; j += 16) { /* e2m1_round in wider registers */
            __m512 v = _mm512_mul_ps(_mm512_loadu_ps(z + i * g + j), _mm512_set1_ps(r[i]));
            __m512i a = _mm512_min_epi32(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7FFFFFFF)), six);
            __m512i p = _mm512_and_si512(_mm512_max_epi32(a, one), _mm512_set1_epi32(0x7F800000));
            __m512 big = _mm512_castsi512_ps(_mm512_add_epi32(p, _mm512_set1_epi32(0x0B400000)));
            __m512 q = _mm512_sub_ps(_mm512_add_ps(_mm512_castsi512_ps(a), big), big);
            __m512i out = _mm512_castps_si512(_mm512_mul_ps(q, _mm512_set1_ps(s[i])));
            __m512i sign = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(bits(r[i]) ? INT32_MIN : 0));
            _mm512_storeu_si512(z + i * g + j, _mm512_or_si512(out, sign));
        }
}
#else
INLINE void group_values(float *z, i64 groups, const int g, const float *r, const float *s) {
    for (i64 i = 0; i < groups; i++)
        for (int j = 0; j < g; j += 8) {
            v8f v, q;
            memcpy(&v, z + i * g + j, 32);
            v *= r[i];
            e2m1_round(v, &q);
            v8i out = (v8i)(q * s[i]) | ((v8i)v & (bits(r[i]) ? INT32_MIN : 0));
            memcpy(z + i * g + j, &out, 32);
        }
}
#endif

static void pack_row(const float *restrict codes, i64 k, uint8_t *restrict byte, uint8_t *restrict out) {
    for (i64 i = 0; i < k; i++) byte[i] = (uint8_t)bits(codes[i]);
    for (i64 i = 0; i < k / 2; i++) {
        uint16_t w;
        memcpy(&w, byte + 2 * i, 2);
        out[i] = (uint8_t)(w | w >> 4);
    }
}

static float row_encode(const Quant *q, i64 row, const uint32_t *amax, i64 groups) {
    float encode = 1.0f;
    if (q->l->format == 0 && !q->l->token) encode = q->l->encode[0];
    if (q->l->format == 0 && q->l->token) {
        uint32_t m = 0;
        for (i64 i = 0; i < groups; i++) m = amax[i] > m ? amax[i] : m;
        encode = 2688.0f / real(m);
        if ((bits(encode) & 0x7FFFFFFFu) >= 0x7F800000u) encode = 1.0f;
    }
    if (q->l->token) q->tensor_scale[row] = 1.0f / encode;
    return encode;
}

static void quantize_row(const Quant *q, i64 row, float *z, char *scratch) {
    i64 k = q->k, g = q->l->format ? 32 : 16, groups = k / g, room = (groups + 15) / 16 * 16;
    uint32_t *amax = (uint32_t *)scratch;
    float *s = (float *)(amax + room), *r = s + room;
    uint8_t *byte = q->codes ? q->scales + row * groups : (uint8_t *)(r + room);
    if (g == 16) group_amax(z, groups, 16, amax);
    else group_amax(z, groups, 32, amax);
    float encode = row_encode(q, row, amax, groups);
    if (g == 16) nvfp4_scales(amax, groups, encode, 1.0f / encode, s, r, byte);
    else mxfp4_scales(amax, groups, (uint32_t)q->l->rule, s, r, byte);
    if (q->codes) {
        if (g == 16) group_codes(z, groups, 16, r);
        else group_codes(z, groups, 32, r);
        pack_row(z, k, (uint8_t *)(r + room), q->codes + row * k / 2);
    } else if (g == 16) group_values(z, groups, 16, r, s);
    else group_values(z, groups, 32, r, s);
}

static void rotate_row(const Quant *q, float *z, void *buf) {
    const Layer *l = q->l;
    if (!l->R) return;
    if (!l->sign) matrix_row(z, q->k, l->t, l->factor, l->R, buf);
    else if (l->R == 16) hadamard_row(z, q->k, l->sign, l->t, 16, buf);
    else if (l->R == 32) hadamard_row(z, q->k, l->sign, l->t, 32, buf);
    else hadamard_row(z, q->k, l->sign, l->t, l->R, buf);
}

/* A row of bf16 among tiles of 16 rows by 32 columns, with zeros up to the end of the last; z is zero behind K. */
static void store_tiles(const float *restrict z, i64 k, i64 row, char *tiles) {
    i64 count = (k + 31) / 32;
    for (i64 t = 0; t < count; t++) store_row(z + 32 * t, 1, 32, tiles + (row / 16 * count + t) * 1024 + row % 16 * 64);
}

static void quantize_rows(const void *ctx, i64 task) {
    const Quant *q = ctx;
    i64 padded = (q->k + 511) / 512 * 512, z_bytes = padded * 4, buf_bytes = (q->l->R * 32 + 63) / 64 * 64;
    char *scratch = aligned_alloc(64, (size_t)(z_bytes + buf_bytes + padded * 2));
    if (!scratch) { atomic_store(q->failed, 1); return; }
    float *z = (float *)scratch;
    memset(z + q->k, 0, (size_t)(padded - q->k) * 4);
    for (i64 row = task * q->rows_per_task; row < MIN(q->rows, (task + 1) * q->rows_per_task); row++) {
        load_row(q->x + row * q->x_stride * (q->x_dtype ? 2 : 4), (int)q->x_dtype, q->k, z);
        rotate_row(q, z, scratch + z_bytes);
        if (q->l->format >= 0) quantize_row(q, row, z, scratch + z_bytes + buf_bytes);
        if (q->tiled) store_tiles(z, q->k, row, q->values);
        else if (q->values) store_row(z, (int)q->v_dtype, q->k, (char *)q->values + row * q->k * (q->v_dtype ? 2 : 4));
    }
    free(scratch);
}

/* tiled: values are bf16 in the tiles of cpu_amx.c, ceil(rows / 16) by ceil(k / 32) of them. */
int qt_quantize(const Layer *l, const void *x, i64 x_dtype, i64 x_stride, i64 rows, void *tensor_scale, void *codes,
                void *scales, void *values, i64 v_dtype, i64 tiled, i64 threads) {
    _Atomic int failed = 0;
    i64 k = l->k;
    unsigned before = keep_small();
    if (l->format >= 0 && !l->token) *(float *)tensor_scale = l->format == 0 ? 1.0f / *l->encode : 1.0f;
    as_before(before);
    Quant q = {l, x, x_dtype, x_stride, rows, k, tensor_scale, codes, scales, values, v_dtype, tiled,
               1 + 16384 / (k + 1), &failed}; /* tasks of 4096 values take 15% more of 512 rows, and 10% less of 16 */
    run(quantize_rows, &q, (rows + q.rows_per_task - 1) / q.rows_per_task, threads);
    return atomic_load(&failed);
}

/* What the CPU kernels share: vector types, float formats, and tasks spread over the process's own OpenMP pool.
 *
 * Types of arrays are named by number: 0 fp32, 1 bf16, 2 fp16. Needs GCC or Clang and a little-endian machine. Vector
 * types compile everywhere; intrinsics stand in where the plain form compiles badly, and compute the same.
 */
#pragma once
#include <float.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define HAVE_AVX2 1
#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define HAVE_AVX512 1
#endif
#endif
#ifdef __SSE2__
#include <xmmintrin.h>
#endif
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only little-endian machines"
#endif
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#ifdef HAVE_AVX2
#define VMAX(a, b) ((v4i)_mm_max_epi32((__m128i)(a), (__m128i)(b)))
#define VMAX8(a, b) ((v8i)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define VMIN8(a, b) ((v8i)_mm256_min_epi32((__m256i)(a), (__m256i)(b)))
#define NARROW(a) ((v4f)_mm256_cvtpd_ps((__m256d)(a)))
/* Fused where it cannot change a result: a product of two fp32 numbers is exact in double. */
#define FMA8(a, b, c) ((v8f)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define FMA(a, b, c) ((v4d)_mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c)))
#define SPREAD8(u) ((v8i)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)(u))))
#define WIDEN(a) ((v4d)_mm256_cvtps_pd((__m128)(a)))
#else
#define VMAX(a, b) ((((a) > (b)) & (a)) | (~((a) > (b)) & (b)))
#define VMAX8(a, b) VMAX(a, b)
#define VMIN8(a, b) ((((a) < (b)) & (a)) | (~((a) < (b)) & (b)))
#define NARROW(a) __builtin_convertvector(a, v4f)
#define FMA8(a, b, c) ((a) * (b) + (c))
#define FMA(a, b, c) ((a) * (b) + (c))
#define SPREAD8(u) ((v8i){(u) & 255, (u) >> 8 & 255, (u) >> 16 & 255, (u) >> 24 & 255, (u) >> 32 & 255, \
                         (u) >> 40 & 255, (u) >> 48 & 255, (u) >> 56})
#define WIDEN(a) __builtin_convertvector(a, v4d)
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE8(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (v4i){__VA_ARGS__})
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (v4l){__VA_ARGS__})
#define SHUFFLE8(a, ...) __builtin_shuffle(a, (v8i){__VA_ARGS__})
#endif

typedef int64_t i64;
typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef double v4d __attribute__((vector_size(32)));
typedef int64_t v4l __attribute__((vector_size(32)));

INLINE uint32_t bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float real(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

/* ---- threads: tasks are claimed one by one; results do not depend on who computes them ---- */

typedef struct { void (*fn)(const void *, i64); const void *ctx; i64 count; _Atomic i64 next; } Team;
extern void (*qt_pool)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel of the process, or NULL */

/* Between the two calls numbers below 2^-126 count, through which scales pass, also where a process flushes them. Every
 * thread has a mode of its own, so each does this. */
INLINE unsigned keep_small(void) {
#ifdef __SSE2__
    unsigned before = _mm_getcsr();
    if (before & 0x8040u) _mm_setcsr(before & ~0x8040u); /* flush to zero, denormals are zero */
    __asm__ volatile("" ::: "memory");                   /* reads stay behind this, writes before the other */
    return before;
#else
    return 0;
#endif
}

INLINE void as_before(unsigned before) {
#ifdef __SSE2__
    __asm__ volatile("" ::: "memory");
    if (before & 0x8040u) _mm_setcsr(before);
#else
    (void)before;
#endif
}

static void work(void *p) {
    Team *t = p;
    unsigned before = keep_small();
    for (i64 i; (i = atomic_fetch_add(&t->next, 1)) < t->count;) t->fn(t->ctx, i);
    as_before(before);
}

INLINE void run(void (*fn)(const void *, i64), const void *ctx, i64 count, i64 threads) {
    Team team = {fn, ctx, count, 0};
    if (qt_pool && threads > 1 && count > 1) qt_pool(work, &team, (unsigned)MIN(threads, count), 0);
    else work(&team);
}

/* ---- float formats ---- */

INLINE float from_fp16(uint16_t h) {
    uint32_t u = h & 0x7FFFu, v = bits(real(u << 13) * 0x1p112f);
    return real((u >= 0x7C00u ? v | 0x7F800000u : v) | (uint32_t)(h & 0x8000u) << 16);
}

static inline void load_row(const void *src, int dtype, i64 n, float *restrict out) {
    const uint16_t *h = src;
    if (dtype == 0) memcpy(out, src, (size_t)n * 4);
    else if (dtype == 1) for (i64 i = 0; i < n; i++) out[i] = real((uint32_t)h[i] << 16);
    else for (i64 i = 0; i < n; i++) out[i] = from_fp16(h[i]);
}

INLINE uint16_t to_bf16(float f) {
    uint32_t u = bits(f);
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : (u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

INLINE uint16_t to_fp16(float f) {
    uint32_t u = bits(f), a = u & 0x7FFFFFFFu;
    uint32_t normal = (a - 0x38000000u + 0xFFFu + (a >> 13 & 1)) >> 13, tiny = bits(real(a) + 0.5f) - 0x3F000000u;
    uint32_t h = a < 0x38800000u ? tiny : a > 0x7F800000u ? 0x7E00u : a >= 0x47800000u ? 0x7C00u : normal;
    return (uint16_t)(h | (u >> 16 & 0x8000u));
}

static inline void store_row(const float *restrict src, int dtype, i64 n, void *restrict dst) {
    uint16_t *h = dst;
    if (dtype == 0) memcpy(dst, src, (size_t)n * 4);
    else if (dtype == 1) for (i64 i = 0; i < n; i++) h[i] = to_bf16(src[i]);
    else for (i64 i = 0; i < n; i++) h[i] = to_fp16(src[i]);
}

INLINE float load_one(const void *p, int dtype, i64 i) {
    if (dtype == 0) return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return dtype == 1 ? real((uint32_t)h << 16) : from_fp16(h);
}

INLINE void store_one(float f, int dtype, i64 i, void *p) {
    if (dtype == 0) ((float *)p)[i] = f;
    else ((uint16_t *)p)[i] = dtype == 1 ? to_bf16(f) : to_fp16(f);
}

/* Values of n scale bytes times a power of two; s has room for n rounded up to 8. */
INLINE void scale_values(const uint8_t *p, i64 n, const int g, float times, float *s) {
    for (i64 i = 0; i < n; i += 8) {
        uint64_t eight = 0;
        if (i + 8 <= n) memcpy(&eight, p + i, 8);
        else for (i64 j = i; j < n; j++) eight |= (uint64_t)p[j] << 8 * (j - i);
        v8i b = SPREAD8(eight), m = b & 0x7F;
        v8f v; /* E4M3: the bits moved to the place of an fp32's are the value times 2^-120, subnormals included */
        if (g == 16) v = (v8f)((v8i)((v8f)(m << 20) * 0x1p120f) | ((m == 0x7F) & 0x7FC00000) | (b & 0x80) << 24);
        else v = (v8f)(b << 23 | (((b == 255) | (b == 0)) & 0x400000));
        v *= times;
        memcpy(s + i, &v, 32);
    }
}

/* What a layer is beside its input: cpu_native.py fills it once and hands it over by address. */
typedef struct {
    const double *t; const float *sign; i64 R; double factor; /* sign: t holds R column factors of a Hadamard */
    i64 format, rule; /* 0 NVFP4, 1 MXFP4, -1 only rotate; rule: the mantissa above which the exponent goes up */
    const float *encode; i64 token;
    const uint8_t *codes, *scales; i64 group, n, k; /* without scales: codes are bf16 values (N, K) */
    const float *w_ts; const i64 *ends; /* ends[p]: first row behind range p, which has the tensor scale w_ts[p] */
    const void *bias; i64 bias_dtype;
} Layer;

/* ---- what is called from other files and from Python, see cpu_build.py ---- */

void qt_set_pool(void *entry);
int qt_quantize(const Layer *l, const void *x, i64 x_dtype, i64 x_stride, i64 rows, void *tensor_scale, void *codes,
                void *scales, void *values, i64 v_dtype, i64 tiled, i64 threads);
int qt_matmul(const Layer *l, const void *x, i64 x_dtype, i64 x_stride, const void *x_scales, const void *x_ts,
              i64 x_ts_step, i64 m, void *y, i64 y_dtype, i64 threads);
int qt_linear(const Layer *const *layers, i64 count, const void *x, i64 x_dtype, i64 x_stride, i64 m, void *const *y,
              i64 y_dtype, i64 tiled, i64 threads);
void qt_decode(const void *codes, const void *scales, i64 group, i64 n, i64 k, void *out, i64 dtype, i64 threads);
int qt_amx_ready(void);
int qt_amx_matmul(const Layer *l, const void *x, const void *x_ts, i64 x_ts_step, i64 m, void *y, i64 y_dtype,
                  i64 threads);
const uint16_t *qt_values(void);

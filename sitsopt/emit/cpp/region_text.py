"""C++ text that every region starts with: how values of each dtype are read and written, and a few functions that
compilers turn into vectors where the library's own they do not."""

REGION_TEXT = r"""
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
#endif
#define INLINE static inline __attribute__((always_inline))

// Where members meet: the last to come lets the others go. Who waits long yields, as another thread may need its core.
struct Control {
    int64_t came, pad0[7], turn, pad1[7];
    void* opened;
};
#define SPINS 400
static inline void meet(Control* c, int64_t team) {
    if (team == 1) return;
    int64_t turn = __atomic_load_n(&c->turn, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&c->came, 1, __ATOMIC_ACQ_REL) == team) {
        __atomic_store_n(&c->came, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&c->turn, turn + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int n = 0; __atomic_load_n(&c->turn, __ATOMIC_ACQUIRE) == turn; n++) {
        if (n < SPINS) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        } else {
            sched_yield();
        }
    }
}

INLINE float up_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}
INLINE uint16_t down_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x == x ? even : (bits >> 16) | 0x40);  // NaN stays a quiet NaN
}
INLINE float round_bf16(float x) { return up_bf16(down_bf16(x)); }

// e^x as 2^n * e^r with |r| <= ln(2) / 2 and a polynomial of degree 6 (Cephes, S. L. Moshier): an error of 1 ulp.
INLINE float exp_f32(float x) {
    float n = rintf(x * 1.44269504f);
    n = n < -126.0f ? -126.0f : n > 127.0f ? 127.0f : n;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float two;
    memcpy(&two, &bits, 4);
    float y = p * two;
    y = x > 88.72284f ? INFINITY : y;
    y = x < -87.33654f ? 0.0f : y;
    return x == x ? y : x;
}
INLINE float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
INLINE float silu_f32(float x) { return x / (1.0f + exp_f32(-x)); }
INLINE float tanh_f32(float x) {
    float a = fabsf(x), e = exp_f32(-2.0f * a), y = (1.0f - e) / (1.0f + e);
    float odd = x * x, small = x - x * odd * (1.0f / 3.0f - odd * (2.0f / 15.0f - odd * (17.0f / 315.0f)));
    return a < 0.1f ? small : copysignf(y, x);
}
INLINE float most(float a, float b) { return a > b || a != a ? a : b; }  // NaN, where one of them is
INLINE float least(float a, float b) { return a < b || a != a ? a : b; }
template <class A, class B> INLINE int64_t most(A a, B b) { return a > b ? a : b; }
template <class A, class B> INLINE int64_t least(A a, B b) { return a < b ? a : b; }
INLINE float square(float x) { return x * x; }
INLINE float cube(float x) { return x * x * x; }
INLINE float gelu_tanh(float x) {
    float inner = 0.797884561f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
    return 0.5f * x * (1.0f + tanh_f32(inner));
}
INLINE float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(x * 0.707106781f)); }

INLINE float up(float x) { return x; }
INLINE float up(uint16_t x) { return up_bf16(x); }
INLINE void down(float x, float* to) { *to = x; }
INLINE void down(float x, uint16_t* to) { *to = down_bf16(x); }

// Rows [0, last) of a matrix become those one further down; channels [begin, end) of them, so that members do not meet.
template <class T>
static void shift_rows(T* x, int64_t last, int64_t stride, int64_t begin, int64_t end) {
    for (int64_t r = 0; r < last; r++) memcpy(x + r * stride + begin, x + (r + 1) * stride + begin, (end - begin) * sizeof(T));
}

// New rows x [B, H, T] of `bytes` each, strides in bytes, go to a ring of rows in every sequence's state: token t to
// place (had + t) mod ring.
static void ring_store(const char* x, const int64_t* sizes, const int64_t* strides, int64_t bytes, char* state,
                       int64_t row_bytes, int64_t ring, int64_t had) {
    for (int64_t b = 0; b < sizes[0]; b++)
        for (int64_t h = 0; h < sizes[1]; h++)
            for (int64_t t = 0; t < sizes[2]; t++)
                memcpy(state + b * row_bytes + (h * ring + (had + t) % ring) * bytes,
                       x + b * strides[0] + h * strides[1] + t * strides[2], bytes);
}

// out[m, n] = x[m, k] w[k, n] + bias, w's rows ldw apart: each member a run of n's, so that it reads whole lines.
template <class T>
static void column_part(const T* x, int64_t m, int64_t k, int64_t ldx, const T* w, int64_t ldw, const T* bias, T* out,
                        int64_t n, float* room, int64_t id, int64_t team) {
    int64_t lines = (n + 63) / 64, begin = lines * id / team * 64, end = lines * (id + 1) / team * 64;
    end = end < n ? end : n;
    int64_t count = end - begin;
    float* sums = room + k;
    for (int64_t r = 0; r < m; r++) {
        for (int64_t i = 0; i < k; i++) room[i] = up(x[r * ldx + i]);
        for (int64_t j = 0; j < count; j++) sums[j] = 0.0f;
        int64_t i = 0;
        for (; i + 4 <= k; i += 4) {
            const T *p = w + i * ldw + begin, *q = p + ldw, *s = q + ldw, *t = s + ldw;
            float a = room[i], b = room[i + 1], c = room[i + 2], d = room[i + 3];
#pragma GCC ivdep
            for (int64_t j = 0; j < count; j++)
                sums[j] += (a * up(p[j]) + b * up(q[j])) + (c * up(s[j]) + d * up(t[j]));
        }
        for (; i < k; i++) {
            const T* p = w + i * ldw + begin;
#pragma GCC ivdep
            for (int64_t j = 0; j < count; j++) sums[j] += room[i] * up(p[j]);
        }
        for (int64_t j = 0; j < count; j++)
            down(sums[j] + (bias ? up(bias[begin + j]) : 0.0f), out + r * n + begin + j);
    }
}
"""

"""The structs that cross from the torch ops to the kernels: plain C, the same text on both sides."""

ATTENTION = r"""
// Strides are in elements. mask_kind: 0 none, 1 bool, 2 f32, 3 bf16, 4 f16. The last dim of q, k, v
// and out is contiguous. sinks: one f32 logit a query head, or null.
// safe: a row that may attend nothing gives zeros, else NaN.
struct SitsAttention {
    const void *q, *k, *v, *mask;
    const float* sinks;
    void* out;
    int64_t batch, heads, kv_heads, rows, keys;
    int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3], mask_stride[4];
    int32_t mask_kind, causal, safe, threads;
    float scale, softcap;
    int64_t tiles_read;  // out: key tiles that were read, summed over batch and kv heads
};
typedef int (*SitsAttentionFn)(SitsAttention*);
"""

KV = r"""
// A layer's cache: rows of bytes, each with the same parts (graph/kv/layout.py). `at` is where a part starts; the
// order is that of `emit/cpp/attention_kv.PARTS`. The first member is the attention over it: k, v are null, keys is
// the mask's width. total: tokens in the cache, all of them stored.
struct SitsKv {
    SitsAttention a;
    uint8_t* state;
    int64_t row_bytes, total, committed;
    int64_t at[16];
    int64_t ring, old, pool, sinks, tiles, rate;  // tokens, tiles, tiles, tokens, tiles, whether mass is added up
    float *peak, *part;        // [batch * kv_heads][tiles][rows], of one step
    float *base, *sum;         // [batch * kv_heads][rows]
};
typedef int (*SitsKvFn)(SitsKv*);
"""

LINEAR = r"""
// w is [n, k] with rows ldw apart, out is [m, n] with rows ldo apart; bias is [n] or null.
struct SitsWeight {
    const void *w, *bias;
    void* out;
    int64_t n, ldw, ldo;
};
// x is [m, k] with rows ldx apart. act: 0 silu, 1 gelu_tanh (gated only: weights are gate, up).
struct SitsLinear {
    const void* x;
    int64_t m, k, ldx;
    const SitsWeight* weights;
    int64_t count;
    int32_t threads, act;
};
typedef int (*SitsLinearFn)(const SitsLinear*);
typedef int (*SitsUnpackFn)(const uint8_t* packed, int64_t unit_bytes, int64_t n, int64_t k, void* out,
                            int64_t ldo, int32_t threads);
"""

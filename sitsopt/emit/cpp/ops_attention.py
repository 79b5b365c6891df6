"""C++ text: the torch op over the attention kernels, and the way through ATen where there is none."""

from __future__ import annotations

_OWN = r"""
namespace {
// Above this many query positions ATen does better; by dtype, as that depends on matrix units.
std::atomic<int64_t> most_query_rows[3] = {INT64_MAX, INT64_MAX, INT64_MAX};

struct AttentionSlot {
    int64_t key;  // dtype, head_dim, value_dim
    std::atomic<SitsAttentionFn> fn;
};
constexpr int MOST_SLOTS = 128;
AttentionSlot attention_slots[MOST_SLOTS];
std::atomic<int> attention_count{0};
thread_local int64_t tiles_read = 0;

int64_t slot_key(int64_t dtype, int64_t head_dim, int64_t value_dim) {
    return (dtype << 40) | (head_dim << 20) | value_dim;
}

SitsAttentionFn attention_kernel(const Tensor& q, const Tensor& k, const Tensor& v) {
    int dtype = dtype_index(q.scalar_type());
    if (dtype < 0 || q.size(2) > most_query_rows[dtype].load(std::memory_order_relaxed)) return nullptr;
    if (k.scalar_type() != q.scalar_type() || v.scalar_type() != q.scalar_type()) return nullptr;
    int64_t key = slot_key(dtype, q.size(3), v.size(3));
    for (int i = 0, n = attention_count.load(std::memory_order_acquire); i < n; i++)
        if (attention_slots[i].key == key) return attention_slots[i].fn.load(std::memory_order_acquire);
    return nullptr;
}

void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v) {
    TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "sits_cpp::attention: q, k and v have 4 dims");
    TORCH_CHECK(q.size(0) == k.size(0) && q.size(0) == v.size(0) && k.size(1) == v.size(1) &&
                    k.size(2) == v.size(2) && q.size(3) == k.size(3),
                "sits_cpp::attention: q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes(), " do not fit");
    TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "sits_cpp::attention: ", q.size(1),
                " query heads are no multiple of ", k.size(1), " key heads");
}

// As SDPA on a CPU: laid out like q, so that transposing back costs no copy; plain when v is of another width.
Tensor attention_output(const Tensor& q, const Tensor& v) {
    if (v.size(3) == q.size(3)) return aten::empty_like::call(q, {}, {}, {}, {}, {});
    return aten::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q);
}

Tensor rows_contiguous(const Tensor& t) {
    return t.stride(3) == 1 || t.size(3) == 1 ? t : t.contiguous();
}

int mask_kind(const OptTensor& mask) {
    if (!mask || !mask->defined()) return 0;
    switch (mask->scalar_type()) {
        case at::kBool: return 1;
        case at::kFloat: return 2;
        case at::kBFloat16: return 3;
        case at::kHalf: return 4;
        default: return -1;
    }
}

// Strides of the mask over [B, Hq, T, S]; 0 where it broadcasts.
void mask_strides(const Tensor& mask, at::IntArrayRef full, int64_t* strides) {
    int64_t missing = 4 - mask.dim();
    TORCH_CHECK(missing >= 0, "sits_cpp::attention: the mask has ", mask.dim(), " dims");
    for (int64_t d = 0; d < 4; d++) {
        int64_t size = d < missing ? 1 : mask.size(d - missing);
        TORCH_CHECK(size == 1 || size == full[d], "sits_cpp::attention: mask ", mask.sizes(),
                    " does not broadcast to ", full);
        strides[d] = size == 1 ? 0 : mask.stride(d - missing);
    }
}

Tensor own_attention(SitsAttentionFn fn, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                        const OptTensor& mask, double scale, bool causal, double softcap, const Tensor& sinks, bool safe) {
    Tensor q = rows_contiguous(q_in), k = rows_contiguous(k_in), v = rows_contiguous(v_in);
    Tensor out = attention_output(q_in, v_in);
    bool direct = out.stride(3) == 1 || out.size(3) == 1;
    Tensor target = direct ? out : aten::empty(out.sizes(), out);
    SitsAttention a{};
    a.q = q.const_data_ptr(), a.k = k.const_data_ptr(), a.v = v.const_data_ptr();
    a.out = target.mutable_data_ptr();
    a.sinks = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr;
    a.batch = q.size(0), a.heads = q.size(1), a.kv_heads = k.size(1), a.rows = q.size(2), a.keys = k.size(2);
    for (int d = 0; d < 3; d++) {
        a.q_stride[d] = q.stride(d), a.k_stride[d] = k.stride(d), a.v_stride[d] = v.stride(d);
        a.out_stride[d] = target.stride(d);
    }
    a.mask_kind = mask_kind(mask);
    if (a.mask_kind) {
        a.mask = mask->const_data_ptr();
        mask_strides(*mask, {a.batch, a.heads, a.rows, a.keys}, a.mask_stride);
    }
    a.causal = causal, a.safe = safe, a.threads = team(), a.scale = (float)scale, a.softcap = (float)softcap;
    TORCH_CHECK(fn(&a) == 0, "sits_cpp: out of memory");
    tiles_read = a.tiles_read;
    if (!direct) out.copy_(target);
    return out;
}
"""

_ATEN = r"""
// The keys that some row may attend, [first, last).
struct KeyRange { int64_t first, last; };

template <class Open>
KeyRange open_range(const int64_t* strides, at::IntArrayRef full, Open open) {
    int64_t b_count = strides[0] ? full[0] : 1, h_count = strides[1] ? full[1] : 1;
    int64_t t_count = strides[2] ? full[2] : 1, keys = full[3];
    int64_t rows = b_count * h_count * t_count;
    std::vector<KeyRange> ranges(rows);
    at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int64_t at = r / t_count / h_count * strides[0] + r / t_count % h_count * strides[1] +
                         r % t_count * strides[2];
            ranges[r] = open(at, strides[3]);
        }
    });
    KeyRange all{keys, 0};
    for (const KeyRange& r : ranges) {
        all.first = std::min(all.first, r.first);
        all.last = std::max(all.last, r.last);
    }
    return all;
}

KeyRange bool_row(const bool* p, int64_t step, int64_t keys) {
    int64_t first = 0, last = keys;
    if (step == 1) {  // words of eight closed keys at a time
        uint64_t word;
        while (first + 8 <= keys && (memcpy(&word, p + first, 8), word == 0)) first += 8;
        while (last >= 8 && (memcpy(&word, p + last - 8, 8), word == 0)) last -= 8;
    }
    while (first < keys && !p[first * step]) first++;
    while (last > first && !p[(last - 1) * step]) last--;
    return first < last ? KeyRange{first, last} : KeyRange{keys, 0};
}

// Very low finite values close a key too, but not in a row that has nothing else.
template <class T> bool closed(const T* p, int64_t step, int64_t from, int64_t n) {
    int open = 0;  // no early exit, so that the loop becomes vectors
    for (int64_t i = from; i < from + n; i++) open |= !((float)p[i * step] <= -1e30f);
    return !open;
}
template <class T> KeyRange float_row(const T* p, int64_t step, int64_t keys) {
    int64_t first = 0, last = keys;
    while (first + 32 <= keys && closed(p, step, first, 32)) first += 32;
    while (last >= first + 32 && closed(p, step, last - 32, 32)) last -= 32;
    while (first < last && closed(p, step, first, 1)) first++;
    while (last > first && closed(p, step, last - 1, 1)) last--;
    if (first < last) return {first, last};
    for (int64_t i = 0; i < keys; i++)
        if ((float)p[i * step] > -INFINITY) return {0, keys};
    return {keys, 0};
}

template <class T, class Row>
KeyRange scan(const Tensor& mask, const int64_t* strides, at::IntArrayRef full, Row row) {
    const T* p = mask.const_data_ptr<T>();
    return open_range(strides, full, [=](int64_t at, int64_t step) { return row(p + at, step, full[3]); });
}

KeyRange key_range(const Tensor& mask, int kind, at::IntArrayRef full) {
    int64_t strides[4];
    mask_strides(mask, full, strides);
    switch (kind) {
        case 1: return scan<bool>(mask, strides, full, bool_row);
        case 2: return scan<float>(mask, strides, full, float_row<float>);
        case 3: return scan<at::BFloat16>(mask, strides, full, float_row<at::BFloat16>);
        case 4: return scan<at::Half>(mask, strides, full, float_row<at::Half>);
        default: return {0, full[3]};
    }
}

// Softcap and sinks, which SDPA has not: in pieces of rows, in f32, K and V never repeated.
void composed_attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& mask, double scale,
                        bool causal, double softcap, const Tensor& sinks, bool safe, Tensor& out) {
    int64_t B = q.size(0), H = q.size(1), Hk = k.size(1), T = q.size(2), S = k.size(2);
    int64_t piece = std::max<int64_t>(1, (int64_t(1) << 22) / std::max<int64_t>(1, B * H * S));
    for (int64_t t = 0; t < T; t += piece) {
        int64_t n = std::min(piece, T - t);
        Tensor rows = q.narrow(2, t, n).reshape({B, Hk, H / Hk * n, q.size(3)});
        Tensor s = rows.matmul(k.transpose(2, 3)).to(at::kFloat).mul_(scale).view({B, H, n, S});
        if (softcap != 0.0) s = s.div_(softcap).tanh_().mul_(softcap);
        if (causal) {
            Tensor row = aten::arange_start::call(t, t + n, at::kLong, {}, q.device(), {}).unsqueeze(1);
            s.masked_fill_(aten::arange_start::call(0, S, at::kLong, {}, q.device(), {}).gt(row), -INFINITY);
        }
        if (mask && mask->defined()) {
            Tensor m = mask->expand({B, H, T, S}).narrow(2, t, n);
            m.scalar_type() == at::kBool ? s.masked_fill_(m.logical_not(), -INFINITY) : s.add_(m);
        }
        if (sinks.defined()) s = aten::cat::call(std::vector<Tensor>{s, sinks.view({1, H, 1, 1}).expand({B, H, n, 1})}, 3);
        Tensor p = (safe ? aten::_safe_softmax::call(s, 3, {}) : s.softmax(3)).narrow(3, 0, S).to(q.scalar_type());
        Tensor o = p.reshape({B, Hk, H / Hk * n, S}).matmul(v);
        out.narrow(2, t, n).copy_(o.view({B, H, n, v.size(3)}));
    }
}

Tensor aten_attention(const Tensor& q, Tensor k, Tensor v, OptTensor mask, double scale, bool causal,
                      double softcap, const Tensor& sinks, bool safe) {
    int64_t S = k.size(2), first = 0, last = S;
    int kind = mask_kind(mask);
    if (kind) {
        KeyRange range = key_range(*mask, kind, {q.size(0), q.size(1), q.size(2), S});
        first = causal ? 0 : range.first;
        last = range.last;
    }
    if (causal) last = std::min(last, q.size(2));
    Tensor out = attention_output(q, v);
    if (first >= last) return out.fill_(safe || sinks.defined() || S == 0 ? 0.0 : NAN);
    k = k.narrow(2, first, last - first);
    v = v.narrow(2, first, last - first);
    if (kind && mask->size(-1) != 1) mask = mask->narrow(-1, first, last - first);
    if (softcap != 0.0 || sinks.defined() || !safe) {
        composed_attention(q, k, v, mask, scale, causal, softcap, sinks, safe, out);
        return out;
    }
    Tensor plain = aten::scaled_dot_product_attention::call(q, k, v, mask, 0.0, causal, scale, q.size(1) != k.size(1));
    return plain.strides() == out.strides() ? plain : out.copy_(plain);
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& mask, double scale,
                 bool causal, double softcap, const OptTensor& sinks, bool safe) {
    check_shapes(q, k, v);
    Tensor sink;
    if (sinks && sinks->defined()) {
        TORCH_CHECK(sinks->numel() == q.size(1), "sits_cpp::attention: ", sinks->numel(), " sinks for ",
                    q.size(1), " heads");
        sink = sinks->to(at::kFloat).reshape({-1}).contiguous();
    }
    bool plain = q.numel() > 0 && k.size(2) > 0 && v.size(3) > 0 && mask_kind(mask) >= 0;
    SitsAttentionFn fn = plain ? attention_kernel(q, k, v) : nullptr;
    if (fn) return own_attention(fn, q, k, v, mask, scale, causal, softcap, sink, safe);
    return aten_attention(q, k, v, mask, scale, causal, softcap, sink, safe);
}
}  // namespace

extern "C" int sits_set_attention(int dtype, int head_dim, int value_dim, void* fn) {
    int64_t key = slot_key(dtype, head_dim, value_dim);
    int n = attention_count.load(), i = 0;
    while (i < n && attention_slots[i].key != key) i++;
    if (i == MOST_SLOTS) return 1;
    attention_slots[i].key = key;
    attention_slots[i].fn.store((SitsAttentionFn)fn, std::memory_order_release);
    if (i == n) attention_count.store(n + 1, std::memory_order_release);
    return 0;
}

extern "C" void sits_set_most_rows(int dtype, int64_t rows) { most_query_rows[dtype] = rows; }

// Key tiles the calling thread's last call read, summed over batch and kv heads.
extern "C" int64_t sits_tiles_read() { return tiles_read; }
"""

ATTENTION_OPS = _OWN + _ATEN

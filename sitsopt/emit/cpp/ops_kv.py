"""C++ text: the torch op over quantized caches. Steps of few tokens run here; what is rare goes to the reference op."""

from __future__ import annotations

KV_OPS = r"""
namespace {
constexpr int64_t KV_FEW = 16;  // tokens of a step that is stored before it is attended: graph/kv/ops.py

struct KvSlot {
    std::string layout;
    int64_t kv_heads, head_dim, value_dim, numbers[24];  // parts, then ring, old, pool, sinks, tiles, rate, recent, max_len
    SitsKvFn fn;
    int dtype;
};
constexpr int KV_MOST = 1024;
KvSlot kv_slots[KV_MOST];
std::atomic<int> kv_count{0};

const KvSlot* kv_slot(const Tensor& k, const Tensor& v, std::string_view layout) {
    int dtype = dtype_index(k.scalar_type());
    for (int i = 0, n = kv_count.load(std::memory_order_acquire); i < n; i++) {
        const KvSlot& s = kv_slots[i];
        if (s.dtype == dtype && s.kv_heads == k.size(1) && s.head_dim == k.size(3) && s.value_dim == v.size(3) &&
            s.layout == layout) return &s;
    }
    return nullptr;
}

using KvOp = Tensor(const Tensor&, const Tensor&, const Tensor&, Tensor, Tensor, const OptTensor&, std::string_view,
                    double, bool, double, const OptTensor&, bool);
using KvPack = void(Tensor, const Tensor&, const Tensor&, int64_t, int64_t, std::string_view);

template <class F> auto kv_reference(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

// Token t of k [B, Hk, T, D] goes to place (had + t) mod ring.
void kv_store(const Tensor& x, uint8_t* state, int64_t row_bytes, int64_t at, int64_t ring, int64_t had) {
    Tensor t = x.stride(3) == 1 || x.size(3) == 1 ? x : x.contiguous();
    int64_t size = t.element_size(), dim = t.size(3) * size;
    const char* from = (const char*)t.const_data_ptr();
    for (int64_t b = 0; b < t.size(0); b++)
        for (int64_t h = 0; h < t.size(1); h++)
            for (int64_t i = 0; i < t.size(2); i++)
                memcpy(state + b * row_bytes + at + (h * ring + (had + i) % ring) * dim,
                       from + (b * t.stride(0) + h * t.stride(1) + i * t.stride(2)) * size, dim);
}

Tensor kv_run(const KvSlot& s, const Tensor& q_in, Tensor& state, const Tensor& mask, int64_t total, int64_t committed,
              double scale, double softcap, const Tensor& sinks, bool safe) {
    Tensor q = rows_contiguous(q_in), out = aten::empty(q_in.sizes(), q_in);
    static thread_local std::vector<float> room;
    SitsKv kv{};
    SitsAttention& a = kv.a;
    a.q = q.const_data_ptr(), a.out = out.mutable_data_ptr();
    a.sinks = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr;
    a.batch = q.size(0), a.heads = q.size(1), a.kv_heads = s.kv_heads, a.rows = q.size(2), a.keys = s.numbers[23];
    for (int d = 0; d < 3; d++) a.q_stride[d] = q.stride(d), a.out_stride[d] = out.stride(d);
    a.mask_kind = mask_kind(mask), a.mask = mask.const_data_ptr();
    mask_strides(mask, {a.batch, a.heads, a.rows, a.keys}, a.mask_stride);
    a.safe = safe, a.threads = team(), a.scale = (float)scale, a.softcap = (float)softcap;
    kv.state = (uint8_t*)state.mutable_data_ptr(), kv.row_bytes = state.stride(0);
    kv.total = total, kv.committed = committed;
    std::copy(s.numbers, s.numbers + 16, kv.at);
    kv.ring = s.numbers[16], kv.old = s.numbers[17], kv.pool = s.numbers[18], kv.sinks = s.numbers[19];
    kv.tiles = s.numbers[20], kv.rate = s.numbers[21];
    int64_t rows = a.rows * (a.heads / a.kv_heads), pairs = a.batch * a.kv_heads;
    if (kv.rate) {
        room.resize(2 * pairs * (kv.tiles + 1) * rows);
        kv.peak = room.data(), kv.part = kv.peak + pairs * kv.tiles * rows;
        kv.base = kv.part + pairs * kv.tiles * rows, kv.sum = kv.base + pairs * rows;
    }
    TORCH_CHECK(s.fn(&kv) == 0, "sits_cpp: out of memory");
    return out;
}

Tensor kv_attention_(const Tensor& q, const Tensor& k, const Tensor& v, Tensor state, Tensor length,
                     const OptTensor& mask, std::string_view layout, double scale, bool causal, double softcap,
                     const OptTensor& sinks, bool safe) {
    const KvSlot* s = kv_slot(k, v, layout);
    int64_t tokens = k.size(2), recent = s ? s->numbers[22] : 0;
    bool ours = s && mask_kind(mask) > 0 && !causal && tokens <= KV_FEW && tokens <= recent && q.numel() &&
                q.scalar_type() == k.scalar_type() && v.scalar_type() == k.scalar_type() && q.size(3) == v.size(3) &&
                state.is_contiguous() && q.size(2) == tokens;
    if (!ours) {
        static auto reference = kv_reference<KvOp>("sits::kv_attention_");
        return reference.call(q, k, v, state, length, mask, layout, scale, causal, softcap, sinks, safe);
    }
    int64_t had = *length.const_data_ptr<int64_t>(), total = had + tokens;
    TORCH_CHECK(total <= s->numbers[23], had, " + ", tokens, " tokens are more than this cache's max_seq_len of ",
                s->numbers[23], "; it is unchanged");
    uint8_t* base = (uint8_t*)state.mutable_data_ptr();
    int64_t* meta = (int64_t*)(base + s->numbers[0]);
    int64_t now = std::max(meta[0], std::min((total - recent) / 64, s->numbers[17]));
    if (now > meta[0]) {
        static auto pack = kv_reference<KvPack>("sits::kv_pack_");
        pack.call(state, k, v, had, now, layout);
    }
    kv_store(k, base, state.stride(0), s->numbers[1], s->numbers[16], had);
    kv_store(v, base, state.stride(0), s->numbers[2], s->numbers[16], had);
    *length.mutable_data_ptr<int64_t>() = total;
    Tensor sink;
    if (sinks && sinks->defined()) sink = sinks->to(at::kFloat).reshape({-1}).contiguous();
    return kv_run(*s, q, state, *mask, total, now, scale, softcap, sink, safe);
}

std::tuple<Tensor, Tensor, Tensor> kv_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& state, const Tensor& length, const OptTensor& mask,
    std::string_view layout, double scale, bool causal, double softcap, const OptTensor& sinks, bool safe) {
    Tensor state2 = state.clone(), length2 = length.clone();
    Tensor out = kv_attention_(q, k, v, state2, length2, mask, layout, scale, causal, softcap, sinks, safe);
    return {out, state2, length2};
}
}  // namespace

// numbers: 24, as in KvSlot. 1 where there is no room for another.
extern "C" int sits_set_kv(int dtype, int64_t kv_heads, int64_t head_dim, int64_t value_dim, const char* layout,
                           const int64_t* numbers, void* fn) {
    int n = kv_count.load(), i = 0;
    auto same = [&](const KvSlot& s) {
        return s.dtype == dtype && s.kv_heads == kv_heads && s.head_dim == head_dim && s.value_dim == value_dim &&
               s.layout == layout;
    };
    while (i < n && !same(kv_slots[i])) i++;
    if (i == KV_MOST) return 1;
    KvSlot& s = kv_slots[i];
    if (i == n) s.layout = layout, s.kv_heads = kv_heads, s.head_dim = head_dim, s.value_dim = value_dim, s.dtype = dtype;
    std::copy(numbers, numbers + 24, s.numbers);
    s.fn = (SitsKvFn)fn;
    if (i == n) kv_count.store(n + 1, std::memory_order_release);
    return 0;
}
"""

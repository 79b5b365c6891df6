"""C++ text: the torch op over the kernels for quantized weights."""

from __future__ import annotations

PACKED_OPS = r"""
namespace {
// One kernel: which weights and activations it is for, the product and the way back to a plain matrix.
struct PackedKernel {
    int dtype, scheme, low, inputs;
    int64_t group;
    std::atomic<SitsLinearFn> fn;
    std::atomic<SitsUnpackFn> unpack;
};
constexpr int MOST_PACKED = 128;
PackedKernel packed_kernels[MOST_PACKED];
std::atomic<int> packed_count;

int scheme_index(std::string_view name) { return name == "int8" ? 0 : name == "int4" ? 1 : name == "fp8" ? 2 : -1; }

PackedKernel* packed_kernel(int dtype, std::string_view scheme, int64_t group, bool low, bool inputs) {
    int index = scheme_index(scheme), count = packed_count.load(std::memory_order_acquire);
    for (int i = 0; i < count; i++) {
        PackedKernel& k = packed_kernels[i];
        if (k.dtype == dtype && k.scheme == index && k.group == group && k.low == low && k.inputs == inputs) return &k;
    }
    return nullptr;
}

bool packed_fits(const Tensor& w, const OptTensor& bias, int64_t rows, const Tensor& x) {
    return w.dim() == 2 && w.scalar_type() == at::kByte && w.is_cpu() && w.is_contiguous() &&
           w.size(0) == (rows + 15) / 16 &&
           (!bias || !bias->defined() ||
            (bias->scalar_type() == x.scalar_type() && bias->dim() == 1 && bias->is_contiguous() &&
             bias->size(0) == rows));
}

using PackedSignature = std::vector<Tensor>(const Tensor&, at::TensorList, const c10::List<OptTensor>&,
                                            at::IntArrayRef, std::string_view, int64_t, bool, std::string_view);

std::vector<Tensor> packed_linears(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases,
                                   at::IntArrayRef rows, std::string_view scheme, int64_t group, bool low,
                                   std::string_view inputs) {
    TORCH_CHECK(weights.size() == biases.size() && weights.size() == rows.size(),
                "sits_cpp::packed_linears: weights, biases and rows differ in number");
    const PackedKernel* kernel = packed_kernel(dtype_index(x.scalar_type()), scheme, group, low, !inputs.empty());
    if (x.dim() < 1 || x.numel() == 0) kernel = nullptr;
    c10::SmallVector<OptTensor, 4> bias;
    for (size_t i = 0; i < weights.size(); i++) {
        bias.push_back(biases.get(i));
        if (!packed_fits(weights[i], bias[i], rows[i], x)) kernel = nullptr;
    }
    if (!kernel) {
        static auto reference =
            c10::Dispatcher::singleton().findSchemaOrThrow("sits::packed_linears", "").typed<PackedSignature>();
        return reference.call(x, weights, biases, rows, scheme, group, low, inputs);
    }
    int64_t k = x.size(-1), m = x.numel() / k;
    std::vector<Tensor> outs;
    outs.reserve(weights.size());
    if (m > MOST_LINEAR_ROWS) {
        for (size_t i = 0; i < weights.size(); i++) {
            Tensor plain = aten::empty({rows[i], k}, x);
            kernel->unpack.load()((const uint8_t*)weights[i].const_data_ptr(), weights[i].size(1), rows[i], k,
                           plain.mutable_data_ptr(), k, team());
            outs.push_back(aten::linear(x, plain, bias[i]));
        }
        return outs;
    }
    c10::SmallVector<SitsWeight, 4> args;
    for (size_t i = 0; i < weights.size(); i++) {
        c10::SmallVector<int64_t, 6> sizes(x.sizes().begin(), x.sizes().end());
        sizes.back() = rows[i];
        outs.push_back(aten::empty(sizes, x));
        bool has_bias = bias[i] && bias[i]->defined();
        args.push_back({weights[i].const_data_ptr(), has_bias ? bias[i]->const_data_ptr() : nullptr,
                        outs[i].mutable_data_ptr(), rows[i], weights[i].size(1), rows[i]});
    }
    call_linear(kernel->fn.load(), x.contiguous(), args.data(), (int64_t)args.size(), 0);
    return outs;
}

// Sixteen words of a tensor, spread evenly, its version and its address. A write through `.data` moves no version: it
// is seen where it touches one of these words.
uint64_t stamp_of(const Tensor& t) {
    uint64_t sum = (uint64_t)(uintptr_t)t.unsafeGetTensorImpl() * 0x9e3779b97f4a7c15u;
    auto mix = [&](uint64_t value) { sum = (sum ^ value) * 0xff51afd7ed558ccdu; sum ^= sum >> 32; };
    if (!t.is_inference()) mix(t._version());
    if (!t.is_cpu() || !t.is_non_overlapping_and_dense()) return sum;
    const char* bytes = (const char*)t.const_data_ptr();
    int64_t words = (int64_t)t.nbytes() / 8;
    mix((uint64_t)(uintptr_t)bytes);
    for (int64_t i = 0; i < 16 && i < words; i++) {
        uint64_t word;
        memcpy(&word, bytes + (words - 1) * i / 15 * 8, 8);
        mix(word);
    }
    return sum;
}

int64_t stamp(at::TensorList tensors) {
    uint64_t sum = tensors.size();
    for (const Tensor& t : tensors) sum = (sum ^ stamp_of(t)) * 0x9e3779b97f4a7c15u;
    return (int64_t)sum;
}
}  // namespace

// Called under the loader's lock; readers see an entry only once the count says so.
extern "C" int sits_set_packed(int dtype, const char* scheme, int64_t group, int low, int inputs, void* fn,
                               void* unpack) {
    PackedKernel* known = packed_kernel(dtype, scheme, group, low, inputs);
    int at = packed_count.load();
    if (!known && at == MOST_PACKED) return 1;
    PackedKernel& entry = known ? *known : packed_kernels[at];
    entry.dtype = dtype, entry.scheme = scheme_index(scheme), entry.low = low, entry.inputs = inputs;
    entry.group = group, entry.fn = (SitsLinearFn)fn, entry.unpack = (SitsUnpackFn)unpack;
    if (!known) packed_count.store(at + 1, std::memory_order_release);
    return 0;
}
"""

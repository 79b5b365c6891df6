"""C++ text: the torch ops over the linear kernels."""

from __future__ import annotations

LINEAR_OPS = r"""
namespace {
// Above this many rows a packed matrix product wins.
constexpr int64_t MOST_LINEAR_ROWS = 16;
std::atomic<SitsLinearFn> linear_fns[3], gated_fns[3];

bool bias_fits(const OptTensor& bias, const Tensor& w) {
    return !bias || !bias->defined() ||
           (bias->scalar_type() == w.scalar_type() && bias->dim() == 1 && bias->is_contiguous() &&
            bias->size(0) == w.size(0));
}

bool weight_fits(const Tensor& x, const Tensor& w, const OptTensor& bias) {
    return w.dim() == 2 && w.scalar_type() == x.scalar_type() && w.is_cpu() && w.size(1) == x.size(-1) &&
           (w.stride(1) == 1 || w.size(1) == 1) && bias_fits(bias, w);
}

SitsLinearFn linear_kernel(const std::atomic<SitsLinearFn>* fns, const Tensor& x) {
    int dtype = dtype_index(x.scalar_type());
    if (dtype < 0 || x.dim() < 1 || x.size(-1) == 0) return nullptr;
    int64_t rows = x.numel() / x.size(-1);
    return rows >= 1 && rows <= MOST_LINEAR_ROWS ? fns[dtype].load(std::memory_order_acquire) : nullptr;
}

Tensor output_of(const Tensor& x, const Tensor& w) {
    c10::SmallVector<int64_t, 6> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = w.size(0);
    return aten::empty(sizes, x);
}

SitsWeight weight_of(const Tensor& w, const OptTensor& bias, Tensor& out) {
    bool has_bias = bias && bias->defined();
    return {w.const_data_ptr(), has_bias ? bias->const_data_ptr() : nullptr, out.mutable_data_ptr(),
            w.size(0), w.stride(0), w.size(0)};
}

void call_linear(SitsLinearFn fn, const Tensor& x, const SitsWeight* weights, int64_t count, int act) {
    int64_t k = x.size(-1);
    SitsLinear args{x.const_data_ptr(), x.numel() / k, k, k, weights, count, team(), act};
    TORCH_CHECK(fn(&args) == 0, "sits_cpp: out of memory");
}

std::vector<Tensor> linears(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases) {
    TORCH_CHECK(weights.size() == biases.size(), "sits_cpp::linears: ", weights.size(), " weights but ",
                biases.size(), " biases");
    SitsLinearFn fn = linear_kernel(linear_fns, x);
    c10::SmallVector<OptTensor, 4> bias;
    for (size_t i = 0; i < weights.size(); i++) {
        bias.push_back(biases.get(i));
        if (!weight_fits(x, weights[i], bias[i])) fn = nullptr;
    }
    std::vector<Tensor> outs;
    outs.reserve(weights.size());
    if (!fn) {
        for (size_t i = 0; i < weights.size(); i++) outs.push_back(aten::linear(x, weights[i], bias[i]));
        return outs;
    }
    c10::SmallVector<SitsWeight, 4> args;
    for (size_t i = 0; i < weights.size(); i++) {
        outs.push_back(output_of(x, weights[i]));
        args.push_back(weight_of(weights[i], bias[i], outs[i]));
    }
    call_linear(fn, x.contiguous(), args.data(), (int64_t)args.size(), 0);
    return outs;
}

Tensor gated(const Tensor& x, const Tensor& gate, const Tensor& up, const OptTensor& gate_bias,
             const OptTensor& up_bias, std::string_view act) {
    TORCH_CHECK(act == "silu" || act == "gelu_tanh", "sits_cpp::gated: act is silu or gelu_tanh, not ", act);
    SitsLinearFn fn = linear_kernel(gated_fns, x);
    if (!fn || !weight_fits(x, gate, gate_bias) || !weight_fits(x, up, up_bias) || gate.size(0) != up.size(0)) {
        Tensor g = aten::linear(x, gate, gate_bias);
        return (act == "silu" ? aten::silu::call(g) : aten::gelu::call(g, "tanh")).mul_(aten::linear(x, up, up_bias));
    }
    Tensor out = output_of(x, gate);
    SitsWeight args[2] = {weight_of(gate, gate_bias, out), weight_of(up, up_bias, out)};
    call_linear(fn, x.contiguous(), args, 2, act == "silu" ? 0 : 1);
    return out;
}
}  // namespace

extern "C" void sits_set_linear(int dtype, void* linear_fn, void* gated_fn) {
    linear_fns[dtype].store((SitsLinearFn)linear_fn, std::memory_order_release);
    gated_fns[dtype].store((SitsLinearFn)gated_fn, std::memory_order_release);
}
"""

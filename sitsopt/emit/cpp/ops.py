"""C++ text of the torch side: the ops `sits_cpp::*`, which pick a kernel by dtype and size or fall back to ATen.

It is the same for every model and machine, so it is built once. Kernels live in objects of their own,
without a torch header, and are handed in as function pointers.
"""

from __future__ import annotations

from . import abi
from .ops_attention import ATTENTION_OPS
from .ops_kv import KV_OPS
from .ops_linear import LINEAR_OPS
from .ops_noted import NOTED_OPS
from .ops_packed import PACKED_OPS
from .ops_region import REGION_OPS

_HEAD = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_safe_softmax_ops.h>
#include <ATen/ops/arange_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/scaled_dot_product_attention_ops.h>
#include <ATen/ops/silu_ops.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <pthread.h>
#include <string>
#include <string_view>
#include <torch/library.h>
#include <vector>
"""

_COMMON = r"""
namespace {
using at::Tensor;
using OptTensor = std::optional<Tensor>;

// The few functions of ATen that are needed. `ATen/ops/NAME.h` brings the whole context in, for three seconds of every
// build; the declarations behind it do not.
namespace aten {
using namespace at::_ops;
Tensor empty(at::IntArrayRef sizes, const Tensor& like) {
    return empty_memory_format::call(c10::fromIntArrayRefSlow(sizes), like.scalar_type(), {}, like.device(), {}, {});
}
Tensor linear(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
    return at::_ops::linear::call(x, weight, bias);
}
}  // namespace aten

// libgomp's pool does not survive a fork: a child works alone rather than wait for threads it lost.
std::atomic<bool> forked{false};
const int fork_hook = pthread_atfork(nullptr, nullptr, [] { forked = true; });
int team() { return forked || at::in_parallel_region() ? 1 : at::get_num_threads(); }

int dtype_index(at::ScalarType t) {
    switch (t) {
        case at::kFloat: return 0;
        case at::kBFloat16: return 1;
        case at::kHalf: return 2;
        default: return -1;
    }
}
}  // namespace
"""

_REGISTER = r"""
TORCH_LIBRARY_FRAGMENT(sits_cpp, m) {
    m.def(
        "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal=False,"
        " float softcap=0.0, Tensor? sinks=None, bool safe=True) -> Tensor",
        {at::Tag::pt2_compliant_tag});
    m.def(
        "kv_attention(Tensor q, Tensor k, Tensor v, Tensor state, Tensor length, Tensor? mask, str layout,"
        " float scale, bool causal=False, float softcap=0.0, Tensor? sinks=None, bool safe=True)"
        " -> (Tensor, Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
    m.def(
        "kv_attention_(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor(b!) length, Tensor? mask, str layout,"
        " float scale, bool causal=False, float softcap=0.0, Tensor? sinks=None, bool safe=True) -> Tensor",
        {at::Tag::pt2_compliant_tag});
    m.def("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
          {at::Tag::pt2_compliant_tag});
    m.def("stamp(Tensor[] tensors) -> int");
    m.def("note(Tensor[] tensors) -> int", TORCH_FN(note));
    m.def(
        "packed_linears(Tensor x, Tensor[] weights, Tensor?[] biases, int[] rows, str scheme, int group,"
        " bool low, str inputs) -> Tensor[]",
        {at::Tag::pt2_compliant_tag});
    m.def("region(Tensor[] args, int handle) -> Tensor[]");
    m.def(
        "gated(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, str act) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(sits_cpp, CPU, m) {
    m.impl("attention", TORCH_FN(attention));
    m.impl("kv_attention", TORCH_FN(kv_attention));
    m.impl("kv_attention_", TORCH_FN(kv_attention_));
    m.impl("linears", TORCH_FN(linears));
    m.impl("gated", TORCH_FN(gated));
    m.impl("stamp", TORCH_FN(stamp));
    m.impl("packed_linears", TORCH_FN(packed_linears));
    m.impl("region", TORCH_FN(region));
}
"""


def ops_text() -> str:
    """The registration unit: schemas, dispatch, fallbacks. Needs torch's headers and libraries."""
    return "\n".join(
        [
            _HEAD,
            abi.ATTENTION,
            abi.KV,
            abi.LINEAR,
            _COMMON,
            ATTENTION_OPS,
            KV_OPS,
            LINEAR_OPS,
            PACKED_OPS,
            NOTED_OPS,
            REGION_OPS,
            _REGISTER,
        ]
    )

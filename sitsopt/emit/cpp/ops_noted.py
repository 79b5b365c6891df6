"""C++ text that notes where tensors lie and how they look, and asks later whether that still holds."""

NOTED_OPS = r"""
namespace {
// Tensors and what a compiled call relies on of each: where it lies, its sizes, strides, dtype and kind.
struct Noted {
    std::vector<Tensor> tensors;
    std::vector<uint64_t> facts;
};

uint64_t facts_of(const Tensor& t) {
    const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
    uint64_t sum = impl->key_set().raw_repr();
    auto mix = [&](uint64_t value) { sum = (sum ^ value) * 0xff51afd7ed558ccdu; sum ^= sum >> 32; };
    mix((uint64_t)t.scalar_type() * 2 + t.requires_grad());
    if (impl->has_storage()) mix((uint64_t)(uintptr_t)impl->unsafe_storage().data() + t.storage_offset());
    if (t.layout() == at::kStrided) {
        for (int64_t size : t.sizes()) mix(size);
        for (int64_t stride : t.strides()) mix(stride);
    }
    return sum;
}

int64_t note(at::TensorList tensors) {
    auto* noted = new Noted{tensors.vec(), {}};
    for (const Tensor& t : tensors) noted->facts.push_back(facts_of(t));
    return (int64_t)(uintptr_t)noted;
}
}  // namespace

extern "C" int sits_moved(const void* handle) {
    const Noted& noted = *(const Noted*)handle;
    for (size_t i = 0; i < noted.tensors.size(); i++)
        if (facts_of(noted.tensors[i]) != noted.facts[i]) return 1;
    return 0;
}

extern "C" void sits_forget(const void* handle) { delete (const Noted*)handle; }
"""

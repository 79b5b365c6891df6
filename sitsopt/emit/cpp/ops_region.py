"""C++ text: the torch op over generated regions."""

from __future__ import annotations

REGION_OPS = r"""
namespace {
typedef int (*SitsRegionFn)(void** a, char* room, int64_t input, int64_t team);
struct RegionTensor {
    at::ScalarType dtype;
    bool written;
    std::vector<int64_t> sizes, strides;
    bool fits(const Tensor& t) const {
        if (t.scalar_type() != dtype || !t.is_cpu() || t.sizes() != at::IntArrayRef(sizes)) return false;
        for (size_t d = 0; d < sizes.size(); d++)
            if (sizes[d] != 1 && t.stride(d) != strides[d]) return false;
        return true;
    }
};
struct RegionCache {  // a packed cache that it writes: what must be done before a step
    int64_t state, length, tokens;  // arguments; new tokens of a step
    int64_t kv_heads, head_dim, value_dim, numbers[24];  // as in KvSlot
    at::ScalarType dtype;
    std::string layout;
};
struct Region {
    SitsRegionFn fn;
    int64_t ours, mine, input;  // bytes that members share, of each member, of its inputs of linears
    std::vector<RegionTensor> args, results;
    std::vector<RegionCache> caches;
};
constexpr int MOST_REGIONS = 1024, MOST_MEMBERS = 256;
std::atomic<Region*> regions[MOST_REGIONS];
struct RegionRoom {  // of a calling thread; it only grows
    char* bytes = nullptr;
    size_t have = 0;
    ~RegionRoom() { free(bytes); }
    bool fit(size_t want) {
        if (want <= have) return true;
        free(bytes);
        bytes = (char*)aligned_alloc(64, (want + 63) / 64 * 64);
        have = bytes ? want : 0;
        return bytes != nullptr;
    }
};
thread_local RegionRoom region_room;

std::vector<RegionTensor> region_tensors(const int64_t*& p) {
    std::vector<RegionTensor> found(*p++);
    for (RegionTensor& t : found) {
        t.dtype = (at::ScalarType)*p++, t.written = *p++ != 0;
        int64_t dims = *p++;
        t.sizes.assign(p, p + dims), t.strides.assign(p + dims, p + 2 * dims);
        p += 2 * dims;
    }
    return found;
}

// Nothing is packed where one of the caches is full.
void region_caches(const Region& r, at::TensorList args) {
    for (const RegionCache& c : r.caches) {
        int64_t had = *args[c.length].const_data_ptr<int64_t>();
        TORCH_CHECK(had + c.tokens <= c.numbers[23], had, " + ", c.tokens, " tokens are more than this cache's max_seq_len of ",
                    c.numbers[23], "; it is unchanged");
    }
    for (const RegionCache& c : r.caches) {
        const Tensor& state = args[c.state];
        int64_t had = *args[c.length].const_data_ptr<int64_t>();
        int64_t old = *(const int64_t*)((const uint8_t*)state.const_data_ptr() + c.numbers[0]);
        int64_t now = std::max(old, std::min((had + c.tokens - c.numbers[22]) / 64, c.numbers[17]));
        if (now <= old) continue;
        auto none = [&](int64_t dim) {
            return aten::empty_strided::call({state.size(0), c.kv_heads, 0, dim}, {0, 0, dim, 1}, c.dtype, {}, at::Device(at::kCPU), {});
        };
        static auto pack = kv_reference<KvPack>("sits::kv_pack_");
        pack.call(state, none(c.head_dim), none(c.value_dim), had, now, c.layout);
    }
}

std::vector<Tensor> region(at::TensorList args, int64_t handle) {
    const Region* r = handle >= 0 && handle < MOST_REGIONS ? regions[handle].load(std::memory_order_acquire) : nullptr;
    TORCH_CHECK(r && args.size() == r->args.size(), "sits_cpp::region: no such region");
    c10::SmallVector<void*, 512> pointers;
    for (size_t i = 0; i < args.size(); i++) {
        TORCH_CHECK(r->args[i].fits(args[i]), "sits_cpp::region: argument ", i, " is ", args[i].scalar_type(), " ",
                    args[i].sizes(), " with strides ", args[i].strides(), "; it was made for ", r->args[i].dtype, " ",
                    at::IntArrayRef(r->args[i].sizes), " with strides ", at::IntArrayRef(r->args[i].strides));
        pointers.push_back(const_cast<void*>(args[i].const_data_ptr()));
    }
    region_caches(*r, args);
    std::vector<Tensor> results;
    results.reserve(r->results.size());
    for (const RegionTensor& t : r->results) {
        results.push_back(aten::empty_strided::call(c10::fromIntArrayRefSlow(t.sizes), c10::fromIntArrayRefSlow(t.strides),
                                                    t.dtype, {}, at::Device(at::kCPU), {}));
        pointers.push_back(results.back().mutable_data_ptr());
    }
    int64_t members = std::min<int64_t>(team(), MOST_MEMBERS);
    TORCH_CHECK(region_room.fit(r->ours + members * (r->mine + r->input)), "sits_cpp: out of memory");
    int failed = r->fn(pointers.data(), region_room.bytes, r->input, members);
    TORCH_CHECK(failed != 1, "sits_cpp: out of memory");
    TORCH_CHECK_INDEX(failed == 0, "index out of range in self");
    for (size_t i = 0; i < args.size(); i++)
        if (r->args[i].written && !args[i].is_inference()) args[i].unsafeGetTensorImpl()->bump_version();
    return results;
}
}  // namespace

// facts: arguments, then results: how many, and for each dtype, whether it is written, dims, sizes, strides. -1: full.
extern "C" int64_t sits_add_region(void* fn, int64_t ours, int64_t mine, int64_t input, const int64_t* facts) {
    Region* made = new Region{(SitsRegionFn)fn, ours, mine, input, {}, {}, {}};
    made->args = region_tensors(facts);
    made->results = region_tensors(facts);
    for (int64_t i = 0; i < MOST_REGIONS; i++) {
        Region* none = nullptr;
        if (regions[i].compare_exchange_strong(none, made)) return i;
    }
    delete made;
    return -1;
}

// facts: state, length, tokens, kv_heads, head_dim, value_dim, a dtype, 24 numbers as in KvSlot. Before the first call.
extern "C" void sits_region_cache(int64_t handle, const int64_t* facts, const char* layout) {
    RegionCache made{facts[0], facts[1], facts[2], facts[3], facts[4], facts[5], {}, (at::ScalarType)facts[6], layout};
    std::copy(facts + 7, facts + 31, made.numbers);
    regions[handle].load()->caches.push_back(made);
}

extern "C" void sits_drop_region(int64_t handle) { delete regions[handle].exchange(nullptr); }
"""

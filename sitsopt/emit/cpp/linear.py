"""C++ text: a few rows of activations times row-major weights, read once, where they lie.

Work is units of 16 weight rows; all weights of a call form one list of units that the threads share out
equally, so several small linears cost one fork and join. An output does not depend on how units fall to
threads.
"""

from __future__ import annotations

from ..kernel import Linear
from .linear_dot import DOT_TEXT

RUN_TEXT = r"""
static void write_unit(const SitsLinear* a, const SitsWeight& weight, int64_t from, float (*sums)[UNIT]) {
    int64_t n = weight.n - from < UNIT ? weight.n - from : UNIT;
    for (int64_t m = 0; m < a->m; m++) {
        elem* out = (elem*)weight.out + m * weight.ldo + from;
        elem rounded[UNIT];
        for (int i = 0; i < UNIT; i++) rounded[i] = narrow(sums[m][i]);
        if (n == UNIT) memcpy(out, rounded, sizeof(rounded));
        else memcpy(out, rounded, n * sizeof(elem));
    }
}

INLINE int64_t units_of(const SitsWeight& weight) { return (weight.n + UNIT - 1) / UNIT; }

static void linear_units(const SitsLinear* a, const float* x, int64_t begin, int64_t end) {
    float sums[MOST_ROWS][UNIT];
    for (int64_t i = 0, first = 0; i < a->count && first < end; i++) {
        const SitsWeight& weight = a->weights[i];
        int64_t last = first + units_of(weight);
        for (; begin < last && begin < end; begin++) {
            unit_sums(a, weight, x, (begin - first) * UNIT, sums);
            write_unit(a, weight, (begin - first) * UNIT, sums);
        }
        first = last;
    }
}

// act(gate) * up, in f32, rounded once.
INLINE vf activate(int act, vf g) {
    if (act == 0) return g / (splat(1.0f) + exp(-g));
    vf inner = splat(0.797884561f) * fma(splat(0.044715f) * g * g, g, g);  // sqrt(2/pi)
    return splat(0.5f) * g * (splat(1.0f) + tanh(inner));
}

static void gated_units(const SitsLinear* a, const float* x, int64_t begin, int64_t end) {
    float gate[MOST_ROWS][UNIT], value[MOST_ROWS][UNIT];
    for (; begin < end; begin++) {
        unit_sums(a, a->weights[0], x, begin * UNIT, gate);
        unit_sums(a, a->weights[1], x, begin * UNIT, value);
        for (int64_t m = 0; m < a->m; m++)
            for (int i = 0; i < UNIT; i += W)
                storef(gate[m] + i, activate(a->act, loadf(gate[m] + i)) * loadf(value[m] + i));
        write_unit(a, a->weights[0], begin * UNIT, gate);
    }
}

typedef void (*RangeFn)(const SitsLinear*, const float*, int64_t, int64_t);
static thread_local float* x_room;
static thread_local int64_t x_have;

static int spread(const SitsLinear* a, int64_t units, int64_t bytes, RangeFn run) {
    int64_t want = a->m * x_stride(a->k) + UNIT;
    if (want > x_have) {
        free(x_room);
        x_room = (float*)aligned_alloc(64, (want * 4 + 63) / 64 * 64);
        x_have = x_room ? want : 0;
        if (!x_room) return 1;
    }
    float* x = x_room;
    prepare(a, x);
    int64_t team = bytes / SHARE < a->threads ? bytes / SHARE : a->threads;
    if (team <= 1 || omp_in_parallel()) {
        run(a, x, 0, units);
        return 0;
    }
#pragma omp parallel num_threads(team)
    {
        int64_t id = omp_get_thread_num(), members = omp_get_num_threads();
        run(a, x, units * id / members, units * (id + 1) / members);
    }
    return 0;
}

extern "C" int SYMBOL(const SitsLinear* a) {
    int64_t units = 0;
    for (int64_t i = 0; i < a->count; i++) units += units_of(a->weights[i]);
    return spread(a, units, units * UNIT * a->k * (int64_t)sizeof(elem), linear_units);
}

// For a caller with a team of its own: bytes of room a member needs, and one member's share.
extern "C" int64_t ROOM_SYMBOL(int64_t m, int64_t k) { return (m * x_stride(k) + UNIT) * 4; }

extern "C" void PART_SYMBOL(const SitsLinear* a, float* x, int64_t id, int64_t team) {
    int64_t units = 0;
    for (int64_t i = 0; i < a->count; i++) units += units_of(a->weights[i]);
    prepare(a, x);
    linear_units(a, x, units * id / team, units * (id + 1) / team);
}

// weights: gate, up of one shape; the result goes to the gate's out.
extern "C" int GATED_SYMBOL(const SitsLinear* a) {
    int64_t units = units_of(a->weights[0]);
    return spread(a, units, 2 * units * UNIT * a->k * (int64_t)sizeof(elem), gated_units);
}

// The fastest plain read this machine gives: what a kernel's bandwidth is measured against.
extern "C" float PROBE_SYMBOL(const char* p, int64_t bytes, int32_t threads) {
    float result = 0.0f;
#pragma omp parallel num_threads(threads) reduction(+ : result)
    {
        int64_t lines = bytes / 256, id = omp_get_thread_num(), team = omp_get_num_threads();
        int64_t begin = lines * id / team * 256, end = lines * (id + 1) / team * 256;
        vf a = {}, b = {}, c = {}, d = {};
        for (int64_t i = begin; i < end; i += 16 * W) {
            if (i % 128 == 0) __builtin_prefetch(p + i + AHEAD, 0, 2);
            if (W == 16) __builtin_prefetch(p + i + AHEAD + 128, 0, 2);
            a += loadf(p + i);
            b += loadf(p + i + 4 * W);
            c += loadf(p + i + 8 * W);
            d += loadf(p + i + 12 * W);
        }
        result += sum(a + b + c + d);
    }
    return result;
}
"""


def text(kernel: Linear) -> str:
    """The linear translation unit after vectors, elements and structs."""
    head = (
        f"#define SYMBOL {kernel.symbol}\n#define GATED_SYMBOL {kernel.symbol}_gated\n"
        f"#define PROBE_SYMBOL {kernel.symbol}_probe\n"
        f"#define PART_SYMBOL {kernel.symbol}_part\n#define ROOM_SYMBOL {kernel.symbol}_room\n"
        "#define SHARE 32768  // bytes of weights below which another thread does not pay\n"
    )
    return head + DOT_TEXT + RUN_TEXT

"""Quantized weights as one tensor of bytes: the layout that kernels read, and how weights are rounded into it.

A weight [N, K] becomes units of 16 rows, uint8 [ceil(N / 16), bytes of a unit]. A unit is its groups of k's, then 16
f32 factors, one a row. A group is lines of 64 bytes - the same 4 k's (8 with int4) of all 16 rows, a word a row - then,
where groups have scales, 16 f16 scales, then with `low` 16 f16 lowest values. A number q stands for

    (q * scale + low) * factor        with groups that have scales; int4 without `low`: ((q - 8) * scale) * factor
    (q + low) * factor                without; the 16 lows are f32 and follow the factors

int8: q is -128..127. int4: 0..15, the lower half of byte j is k = j, the higher k = j + 4. fp8: e4m3, the bytes of a
word are k = 0, 2, 1, 3. Factors are a power of two where groups have scales: f16 then has the range it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

UNIT = 16
SCHEMES = ("int8", "int4", "fp8")
FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
CHUNK = 1 << 22  # elements rounded at a time: bounds the memory that packing takes

_ERRORS = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Layout:
    """Where things lie for one scheme; group 0 means one scale a row."""

    scheme: str
    group: int = 0
    low: bool = False

    @property
    def line_k(self) -> int:
        """k's of a row in a line."""
        return 8 if self.scheme == "int4" else 4

    @property
    def width(self) -> int:
        """k's of a group, whether it has a scale or not."""
        return self.group or 64

    def groups(self, k: int) -> int:
        return -(-k // self.width)

    @property
    def group_bytes(self) -> int:
        scales = 32 * (1 + self.low) if self.group else 0
        return self.width // self.line_k * 64 + scales

    def unit_bytes(self, k: int) -> int:
        return self.groups(k) * self.group_bytes + 64 * (2 if self.low and not self.group else 1)

    def bits(self, n: int, k: int) -> float:
        """Bits a weight, scales and padding included."""
        return 8 * -(-n // UNIT) * self.unit_bytes(k) / (n * k)


@dataclass
class Rounded:
    """Rounded rows before they are laid out: numbers [N, groups * width] (int8, or fp8 as its bytes), scale and low
    [N, groups] in f16 or [N] in f32 or None, factor [N] in f32."""

    numbers: Tensor
    scale: Tensor | None
    low: Tensor | None
    factor: Tensor


def pack(weight: Tensor, scheme: str, group: int, low: bool, per: str) -> Tensor:
    """A weight [N, K] rounded to the nearest, laid out. per: for fp8 what shares a scale, `tensor`, `row` or `block`
    (128 x 128, with group 128). A row with a number that is not finite becomes NaN."""
    layout = Layout(scheme, group, low)
    whole = _shared_scale(weight, per) if scheme == "fp8" else None
    rows = max(128, CHUNK // max(1, weight.shape[1]) // 128 * 128)
    parts, missed, size = [], 0.0, 0.0
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].to(torch.float32)
        rounded = round_rows(part, layout, None if whole is None else whole[start : start + rows])
        parts.append(lay_out(rounded, layout))
        if parts[-1].device.type != "meta" and type(parts[-1]) is Tensor:
            gone = values(rounded, layout, part.shape[1]) - part
            missed += float(gone.double().square().sum())
            size += float(part.double().square().sum())
    packed = torch.cat(parts)
    if type(packed) is Tensor and packed.device.type != "meta":
        _ERRORS[packed] = (missed / size) ** 0.5 if size else 0.0
    return packed


def nearest(weight: Tensor, scheme: str, group: int, low: bool, per: str) -> Tensor:
    """What a packed weight [N, K] will stand for, in the weight's own dtype; for any group."""
    layout = Layout(scheme, group, low)
    scale = _shared_scale(weight, per) if scheme == "fp8" else None
    rounded = round_rows(weight.to(torch.float32), layout, scale)
    return values(rounded, layout, weight.shape[1]).to(weight.dtype)


def error_of(packed: Tensor) -> float | None:
    """How far the rounded weight is from the original: the root of the squared errors' sum over that of the squares.
    None for what `pack` did not make."""
    found: float | None = _ERRORS.get(packed)
    return found


def note_error(packed: Tensor, error: float) -> None:
    """What `error_of` says of a packed weight that was made elsewhere."""
    _ERRORS[packed] = error


def _shared_scale(weight: Tensor, per: str) -> Tensor:
    """fp8 scales before rounding: [N, 1], or [N, groups] for blocks."""
    size = weight.detach().abs().to(torch.float32)
    if per == "tensor":
        return (size.amax() / FP8_MOST).expand(size.shape[0], 1)
    if per == "row":
        return size.amax(1, keepdim=True) / FP8_MOST
    n, k = size.shape
    padded = F.pad(size, (0, -k % 128, 0, -n % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, -1, 128).amax((1, 3)) / FP8_MOST
    return blocks.repeat_interleave(128, 0)[:n]


def round_rows(weight: Tensor, layout: Layout, fp8_scale: Tensor | None = None) -> Rounded:
    """f32 [N, K] to the nearest numbers. fp8_scale: [N, 1] or [N, groups], else taken from the rows."""
    n, k = weight.shape
    pad = layout.groups(k) * layout.width - k
    if pad:  # by copies of the last, which change no group's range
        weight = torch.cat([weight, weight[:, -1:].expand(n, pad)], 1)
    grouped = weight.view(n, -1, layout.width) if layout.group else weight.view(n, 1, -1)
    if layout.scheme == "fp8":
        assert fp8_scale is not None
        scale, lowest = fp8_scale, None
    elif layout.low:
        scale, lowest = _range(grouped, layout)
    elif layout.scheme == "int8":
        scale, lowest = grouped.abs().amax(2) / 127, None
    else:
        scale, lowest = _symmetric4(grouped), None
    return _finish(grouped, scale, lowest, layout)


def _range(grouped: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(scale, lowest value) of each group. Equal values have no range: all of them are the lowest."""
    bottom, top = grouped.amin(2), grouped.amax(2)
    return (top - bottom) / (15 if layout.scheme == "int4" else 255), bottom


def _symmetric4(grouped: Tensor) -> Tensor:
    """The better of two scales: the largest value at -8, or the largest size at 7."""
    extreme = torch.take_along_dim(grouped, grouped.abs().argmax(2, keepdim=True), 2)[..., 0]
    candidates = [extreme / -8, extreme.abs() / 7]
    losses = []
    for scale in candidates:
        step = scale[..., None]
        near = torch.round(grouped / _not_zero(step)).clamp(-8, 7) * step
        losses.append((near - grouped).square().sum(2))
    return torch.where(losses[0] < losses[1], candidates[0], candidates[1])


def _not_zero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


def _finish(grouped: Tensor, scale: Tensor, lowest: Tensor | None, layout: Layout) -> Rounded:
    """Scales as they will be kept, then the numbers that are nearest with these."""
    n = grouped.shape[0]
    zero = 0 if layout.scheme == "int4" and layout.low else -128
    if not layout.group:
        if lowest is not None:
            scale = torch.where(scale == 0, _not_zero(lowest.abs()), scale)
        step = _not_zero(scale)
        low = None if lowest is None else lowest / step - zero
        exact = grouped / step[..., None]
        factor = scale[:, 0]
        numbers = _numbers(exact if low is None else exact - low[..., None], layout)
        return Rounded(numbers.view(n, -1), None, None if low is None else low[:, 0], factor)
    most = scale.abs() if lowest is None else torch.maximum(scale, lowest.abs())
    factor = (
        power_of_two(most.amax(1))
        if layout.scheme != "fp8"
        else power_of_two(most.amax().expand(n))
    )
    half = (scale / factor[:, None]).half()
    step = _not_zero(half.float())[..., None]
    exact = grouped / factor[:, None, None]
    if lowest is None:
        return Rounded(_numbers(exact / step, layout).view(n, -1), half, None, factor)
    shift = lowest / factor[:, None] - zero * half.float()
    low = shift.half()
    numbers = _numbers((exact - low.float()[..., None]) / step, layout)
    return Rounded(numbers.view(n, -1), half, low, factor)


def power_of_two(most: Tensor) -> Tensor:
    """Factors that bring the largest scale to 2^10, which leaves f16 room on both sides."""
    exponent = torch.floor(torch.log2(most)) - 10
    exponent = torch.where(most == 0, 0.0, exponent.clamp(min=-120))
    return torch.exp2(exponent)


def _numbers(exact: Tensor, layout: Layout) -> Tensor:
    if layout.scheme == "fp8":
        return exact.clamp(-FP8_MOST, FP8_MOST).to(FP8).view(torch.uint8)
    if layout.scheme == "int8":
        return torch.round(exact).clamp(-128, 127).to(torch.int8)
    if layout.low:
        return torch.round(exact).clamp(0, 15).to(torch.int8)
    return (torch.round(exact).clamp(-8, 7) + 8).to(torch.int8)


def values(rounded: Rounded, layout: Layout, k: int) -> Tensor:
    """What rounded rows stand for: f32 [N, k]."""
    n = rounded.numbers.shape[0]
    numbers = rounded.numbers.view(FP8) if layout.scheme == "fp8" else rounded.numbers
    q = numbers.to(torch.float32).view(n, -1, layout.width)
    if layout.scheme == "int4" and not layout.low:
        q = q - 8
    if rounded.scale is not None:
        q = q * rounded.scale.float()[..., None]
        q = q if rounded.low is None else q + rounded.low.float()[..., None]
    elif rounded.low is not None:
        q = q + rounded.low[:, None, None]
    return (q * rounded.factor[:, None, None]).view(n, -1)[:, :k]


def lay_out(rounded: Rounded, layout: Layout) -> Tensor:
    """Rounded rows as the bytes of their units."""
    numbers = rounded.numbers.view(torch.uint8)
    n, k = numbers.shape
    pad = -n % UNIT
    units, groups = (n + pad) // UNIT, k // layout.width
    numbers = F.pad(numbers, (0, 0, 0, pad))
    lined = numbers.view(units, UNIT, groups, layout.width // layout.line_k, layout.line_k)
    if layout.scheme == "int4":
        lined = lined[..., :4] | (lined[..., 4:] << 4)
    elif layout.scheme == "fp8":
        lined = lined[..., [0, 2, 1, 3]]
    parts = [lined.permute(0, 2, 3, 1, 4).reshape(units, groups, -1)]
    tail = [F.pad(rounded.factor, (0, pad)).view(units, UNIT)]
    for extra in (rounded.scale, rounded.low):
        if extra is None:
            continue
        if extra.dim() == 1:
            tail.append(F.pad(extra, (0, pad)).view(units, UNIT))
        else:
            by_unit = F.pad(extra, (0, 0, 0, pad)).view(units, UNIT, groups).transpose(1, 2)
            parts.append(by_unit.contiguous().view(torch.uint8))
    whole = torch.cat(parts, 2).view(units, -1)
    return torch.cat([whole, torch.cat(tail, 1).contiguous().view(torch.uint8)], 1)


def step_of(layout: Layout) -> int:
    """k's whose activations share a scale: the largest share of a group, in eights, up to 64."""
    return next(n for n in range(min(layout.width, 64) // 8 * 8, 0, -8) if layout.width % n == 0)


def round_inputs(x: Tensor, layout: Layout) -> Tensor:
    """Activations [*, K] as 8-bit integers would have them, in steps of k's that share a scale; rows with a number
    that is not finite stay."""
    step = step_of(layout)
    wide = F.pad(x.to(torch.float32), (0, -x.shape[-1] % step)).unflatten(-1, (-1, step))
    top = wide.abs().amax(-1, keepdim=True)
    near = torch.round(wide * (127 / _not_zero(top))) * (top / 127)
    near = torch.where(top.isfinite(), near, wide)
    return near.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def unpack(packed: Tensor, n: int, k: int, layout: Layout) -> Tensor:
    """What a packed weight stands for: f32 [n, k]."""
    units, groups = packed.shape[0], layout.groups(k)
    body = packed[:, : groups * layout.group_bytes].reshape(units, groups, layout.group_bytes)
    lines = layout.width // layout.line_k
    q = body[..., : lines * 64].reshape(units, groups, lines, UNIT, 4).permute(0, 3, 1, 2, 4)
    if layout.scheme == "int4":
        q = torch.cat([q & 15, q >> 4], -1)
    elif layout.scheme == "fp8":
        q = q[..., [0, 2, 1, 3]]
    numbers = q.reshape(units * UNIT, -1)
    if layout.scheme == "int8":
        numbers = numbers.view(torch.int8)
    tail = packed[:, groups * layout.group_bytes :].contiguous().view(torch.float32)
    factor, scale, low = tail[:, :UNIT].reshape(-1), None, None
    if layout.group:
        halves = body[..., lines * 64 :].contiguous().view(torch.float16)
        halves = halves.view(units, groups, -1, UNIT).permute(2, 0, 3, 1)
        scale, *rest = halves.reshape(halves.shape[0], -1, groups).unbind(0)
        low = rest[0] if rest else None
    elif layout.low:
        low = tail[:, UNIT:].reshape(-1)
    return values(Rounded(numbers, scale, low, factor), layout, k)[:n]

"""The ops over a layer's cache. Functional, so that rules may move them; their bodies run as they are, never traced.

Lowering turns the copy of a new state into the old one into a write in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .rating import observe, open_keys, promote, sampled, set_start
from .state import Fresh, State, shape_of

Tensor = torch.Tensor
UPDATE = (
    "kv_update(Tensor k, Tensor v, Tensor state, Tensor length, str layout)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
ATTENTION = (
    "kv_attention(Tensor q, Tensor k, Tensor v, Tensor state, Tensor length, Tensor? mask, str layout, float scale,"
    " bool causal=False, float softcap=0.0, Tensor? sinks=None, bool safe=True) -> (Tensor, Tensor, Tensor)"
)
PACK = "kv_pack_(Tensor(a!) state, Tensor k, Tensor v, int had, int now, str layout) -> ()"
IN_PLACE = (
    ATTENTION.replace("kv_attention", "kv_attention_")
    .replace("Tensor state", "Tensor(a!) state")
    .replace("Tensor length", "Tensor(b!) length")
    .replace("(Tensor, Tensor, Tensor)", "Tensor")
)


FEW = 16  # tokens of one step, at most, that are stored before attention reads them


def update_(k: Tensor, v: Tensor, state: State, length: Tensor) -> tuple[Tensor, Tensor, Fresh]:
    """Store k and v; all keys and values; and which tiles became old and are still to be rated.

    A step of few tokens packs what gets old first and reads it as it is kept, so that nothing but the state is read. A
    longer one is attended as it came, and rated by that: nothing else would be known of a long prompt.
    """
    had, count = int(length), k.shape[2]
    state.check_room(had, count)
    if count <= FEW:
        fresh = state.append(had, k, v)
        promote(state, fresh)
        keys, values = (t.to(k.dtype) for t in state.read(had + count))
        fresh = replace(fresh, old=fresh.now)
    else:
        keys, values = (t.to(k.dtype) for t in state.read(had))
        keys[:, :, had : had + count] = k
        values[:, :, had : had + count] = v
        fresh = state.append(had, k, v)
    length.add_(count)
    return keys, values, fresh


def rate_(state: State, seen: Tensor, weights: Tensor, fresh: Fresh) -> None:
    """What attention tells a cache: where sequences begin, what is hot. `weights`: as `rating.observe` takes them."""
    if fresh.old == 0 and (state.layout.sinks or state.layout.budget):
        set_start(state, seen)  # later, its first tokens are put aside already
    state.keep_sinks(fresh)
    if state.layout.budget:
        observe(state, weights, seen)
        promote(state, fresh)


def kv_update(
    k: Tensor, v: Tensor, state: Tensor, length: Tensor, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [B, Hk, max_len, D] with k and v [B, Hk, T, D] behind the `length` tokens there are, the new
    state and length. Raises CacheFull. What attention then looks at is not seen: nothing gets hot."""
    state, length = state.clone(), length.clone()
    keys, values, _ = update_(k, v, State(state, shape_of(k, v, layout)), length)
    return keys, values, state, length


def kv_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, length: Tensor, *more: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`kv_attention_` that leaves its state and length alone, and returns the new ones behind the result."""
    state, length = state.clone(), length.clone()
    return kv_attention_(q, k, v, state, length, *more, **named), state, length


def kv_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    length: Tensor,
    mask: Tensor | None,
    layout: str,
    scale: float,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    safe: bool = True,
) -> Tensor:
    """`kv_update` in place, and `sits.attention` of q [B, Hq, T, D] over its keys; tiles are rated by what q attends."""
    view = State(state, shape_of(k, v, layout))
    keys, values, fresh = update_(k, v, view, length)
    out = torch.ops.sits.attention(q, keys, values, mask, scale, causal, softcap, sinks, safe)
    out = out.contiguous()
    if view.layout.old:
        rows = sampled(q.shape[2], q.device)
        mask = mask_of(rows, q.shape[2], keys.shape[2], mask, causal)
        weights = weights_of(q[:, :, rows], keys, mask, scale, softcap, sinks)
        rate_(view, open_keys(mask), weights, fresh)
    return out


def kv_pack_(state: Tensor, k: Tensor, v: Tensor, had: int, now: int, layout: str) -> None:
    """Before tokens k, v [B, Hk, T, D] are stored behind the `had` there are: pack all tiles up to `now`, and rate them."""
    view = State(state, shape_of(k, v, layout))
    promote(view, view.commit(had, k, v, now))


def mask_of(rows: Tensor, count: int, keys: int, mask: Tensor | None, causal: bool) -> Tensor:
    """The mask of some of `count` query positions, [.., rows, S]. causal: top-left, as in SDPA."""
    if mask is None:
        mask = rows.new_ones(len(rows), keys, dtype=torch.bool)
    else:
        mask = mask.expand(*mask.shape[:-2], count, keys)[..., rows, :]
    if not causal:
        return mask
    later = torch.arange(keys, device=rows.device) > rows.unsqueeze(1)
    return mask.masked_fill(later, False if mask.dtype == torch.bool else -torch.inf)


def weights_of(
    q: Tensor,
    keys: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, Hk, S] f32: attention weights, summed over queries and the heads of a group."""
    batch, heads, count, dim = q.shape
    group = heads // keys.shape[1]
    grouped = q.float().reshape(batch, keys.shape[1], group * count, dim)
    scores = (grouped @ keys.float().transpose(2, 3) * scale).view(batch, heads, count, -1)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        beside = sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, count, 1)
        scores = torch.cat([scores, beside], -1)
    weights = F.softmax(scores, -1)[..., : keys.shape[2]].nan_to_num(0.0)
    return weights.sum(2).unflatten(1, (-1, group)).sum(2)


def _fake_update(k: Any, v: Any, state: Any, length: Any, layout: str) -> Any:
    most = shape_of(k, v, layout).layout.max_len
    keys, values = (t.new_empty(*t.shape[:2], most, t.shape[3]) for t in (k, v))
    return keys, values, torch.empty_like(state), torch.empty_like(length)


def _fake_result(q: Any, k: Any, v: Any, state: Any, length: Any, *more: Any, **named: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _fake_attention(
    q: Any, k: Any, v: Any, state: Any, length: Any, *more: Any, **named: Any
) -> Any:
    made = _fake_result(q, k, v, state, length)
    return made, torch.empty_like(state), torch.empty_like(length)


def _fake_nothing(*args: Any) -> None:
    return None


def register(library: torch.library.Library) -> None:
    """Define the ops in the namespace `sits`."""
    for schema, body, fake in (
        (UPDATE, kv_update, _fake_update),
        (ATTENTION, kv_attention, _fake_attention),
        (IN_PLACE, kv_attention_, _fake_result),
        (PACK, kv_pack_, _fake_nothing),
    ):
        name = schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sits::{name}", fake, lib=library)

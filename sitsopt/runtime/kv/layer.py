"""One attention layer's cache, as transformers asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ...graph import ops as _reference_ops  # noqa: F401  registers the sits:: ops
from ...graph.facts import DTYPE_NAMES
from ...graph.kv.layout import TILE, Layout, Shape
from ...graph.kv.ops import mask_of, rate_, update_, weights_of
from ...graph.kv.rating import open_keys, sampled
from ...graph.kv.state import COMMITTED, Fresh, State, empty
from .watched import Watched, Watcher


class QuantizedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer in one tensor, `state`, that is written in place. `cumulative_length` is the
    number of tokens, the same in every row: shorter sequences are padded on the left."""

    is_compileable = True
    is_croppable = True

    def __init__(self, layout: Layout, sliding_window: int | None = None) -> None:
        super().__init__()
        self.layout, self.layout_text = layout, str(layout)
        self.is_sliding, self.sliding_window = sliding_window is not None, sliding_window
        self.cumulative_length = torch.tensor(0, dtype=torch.int64)
        self.state: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate everything, once, for keys and values of these sizes."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.layout = replace(self.layout, kept=DTYPE_NAMES[self.dtype])
        self.layout_text = str(self.layout)
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        self.state = empty(self.shape, self.batch_size, self.device)
        self.cumulative_length = self.cumulative_length.to(self.device)
        self._pin()
        self.is_initialized = True

    def _pin(self) -> None:
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.state)
            torch._dynamo.mark_static_address(self.cumulative_length)

    @property
    def shape(self) -> Shape:
        """Its sizes; only once it is initialized."""
        return Shape(self.layout, self.num_heads, self.k_head_dim, self.v_head_dim)

    def view(self) -> State:
        """The parts of its tensor."""
        assert self.state is not None
        return State(self.state, self.shape)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v [B, Hk, T, D]; all keys and values, [B, Hk, max_seq_len, D], those of this call exact.

        Raises CacheFull, and has changed nothing then.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.compiler.is_compiling():
            keys, values, state, length = torch.ops.sits.kv_update(
                key_states, value_states, self.state, self.cumulative_length, self.layout_text
            )
            assert self.state is not None
            self.state.copy_(state)
            self.cumulative_length.copy_(length)
            return keys, values
        with torch.no_grad():
            state = self.view()
            keys, values, fresh = update_(key_states, value_states, state, self.cumulative_length)
        if not self.layout.old:
            return keys, values
        return Watched.over(keys, self._watcher(state, keys, fresh)), values

    def _watcher(self, state: State, keys: Any, fresh: Fresh) -> Watcher:
        @torch.no_grad()
        def attends(q: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> None:
            # A group's queries at one position may come as rows: then the mask has one row.
            one = mask is not None and mask.shape[-2] == 1
            count = 1 if one else q.shape[2]
            rows = sampled(count, q.device)
            here = mask_of(rows, count, keys.shape[2], mask, causal)
            weights = weights_of(q if one else q[:, :, rows], keys, here, scale)
            rate_(state, open_keys(here), weights, fresh)

        @torch.no_grad()
        def weighs(weights: torch.Tensor) -> None:
            _, heads, count, _ = weights.shape
            rows = sampled(count, weights.device)
            mine = weights[:, :, rows, : keys.shape[2]].float()
            grouped = mine.sum(2).unflatten(1, (self.num_heads, heads // self.num_heads)).sum(2)
            rate_(state, (mine > 0).any(1), grouped, fresh)

        return Watcher(attends, weighs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks always cover the whole cache, so that their sizes do not change."""
        return self.layout.max_len, 0

    def get_seq_length(self) -> Any:
        """Tokens in it: a tensor, so that a compiled graph does not depend on their number."""
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Tokens it has room for."""
        return self.layout.max_len

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is given negative. Raises ValueError for what cannot be taken back."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative one, not {tokens_to_remove}")  # fmt: skip
        if not self.is_initialized or tokens_to_remove == 0:
            return
        length = int(self.cumulative_length)
        new = max(0, length + tokens_to_remove)
        if not self._loose(length, new):
            self.view().crop(length, new)
        self.cumulative_length.fill_(new)

    def _loose(self, length: int, new: int) -> bool:
        """Whether the tokens from `new` on lie in the ring alone, and nothing else has been told of them: then they need
        not be looked at, as the next ones overwrite them."""
        layout = self.layout
        if layout.budget:
            return False
        if not layout.old:
            return length <= layout.ring or length - new <= layout.ring - layout.recent
        assert self.state is not None
        words = self.state[0, : 8 * (COMMITTED + 1)].view(torch.int64)
        return int(words[COMMITTED]) * TILE <= new

    def reset(self) -> None:
        """Empty, where it lies."""
        if self.state is not None:
            self.state.zero_()
        self.cumulative_length.zero_()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._pick(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.is_initialized:
            self._pick(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        if self.is_initialized:
            self._pick(torch.arange(self.batch_size)[indices.cpu()])

    def _pick(self, rows: torch.Tensor) -> None:
        if self.state is None:
            return
        picked = self.state.index_select(0, rows.to(self.device))
        if picked.shape == self.state.shape:
            self.state.copy_(picked)
            return
        self.state, self.batch_size = picked, picked.shape[0]
        self._pin()

    def offload(self) -> None:
        """Move to the CPU."""
        if self.state is not None:
            self.state = self.state.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Move back to the layer's device."""
        if self.state is not None:
            self.state = self.state.to(self.device, non_blocking=True)

"""A compiled model with its cache of fixed size: rows of tokens in, logits out, rows taken back.

Calls come in few sizes. A row beyond what was asked for repeats a token, and is taken back at once: the cache
counts back, and the next call overwrites it. No cache is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..runtime.hooks.stepdown import SmallerCalls, divisible
from .sizes import pieces


class Runner:
    """call: the compiled model. cache: laid out, of fixed size. name: what `call` calls its cache. keeps: whether it
    takes `logits_to_keep`. depth: how many of the cache's layers `call` writes, all by default.

    free: how many rows can be taken back behind so many tokens, without a trace; any number by default.
    padded: whether rows can be taken back, so that calls may be padded. mask [batch, room], int64 and positions
    [batch, 1], int64 (of the next token): for rows of which some are hidden, else None.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        cache: Any,
        name: str,
        *,
        keeps: bool = True,
        padded: bool = True,
        blocks: Sequence[int] = (),
        depth: int | None = None,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        free: Callable[[int], int] | None = None,
    ) -> None:
        self.call, self.cache, self.name, self.keeps = call, cache, name, keeps
        self.padded, self.blocks = padded, tuple(blocks)
        self.depth, self._free = depth, free
        self.mask, self.positions = mask, positions
        self.room = room_of(cache)
        self.length = int(cache.get_seq_length())
        self.most_rows: int | None = None  # of a call, once memory was short
        self._one: torch.Tensor | None = None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocabulary] after one token [batch] more of each row."""
        if self._one is None:  # the same buffer at every call: strides never change
            self._one = torch.empty(len(tokens), 1, dtype=torch.long, device=tokens.device)
        self._one[:, 0] = tokens
        return self._run(self._one, 1)[:, -1]

    def prefill(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [batch, vocabulary] after `ids` [batch, tokens], in pieces of the sizes that are compiled; where these
        find no memory, in smaller ones."""
        begun = 0
        while begun < ids.shape[1]:
            tokens, rows = self._next(ids.shape[1] - begun)
            part = slice(begun, begun + tokens)
            try:
                with divisible() if rows > 1 else nullcontext():
                    logits = self._piece(ids[:, part], rows, positions, part)
            except SmallerCalls:
                self.most_rows = tokens if tokens < rows else max(1, rows // 4)
                continue
            begun += tokens
        if positions is not None:
            self.positions = positions[:, -1:] + 1
        return logits

    def _piece(
        self, ids: torch.Tensor, rows: int, positions: torch.Tensor | None, part: slice
    ) -> torch.Tensor:
        tokens = ids.shape[1]
        at = None if positions is None else _padded(positions[:, part], rows)
        logits = self._run(_padded(ids, rows), self._last(tokens, rows, ids), at)
        self.rewind(rows - tokens)
        return logits[:, -1] if logits.shape[1] == 1 else logits[:, tokens - 1]

    def check(self, tokens: Sequence[int], device: torch.device) -> torch.Tensor:
        """Logits [tokens, vocabulary] after each of a block of tokens, of one row: at most `most` and one before them."""
        count = len(tokens)
        rows = next(b for b in self.blocks if b >= count)
        block = torch.tensor([[*tokens, *[tokens[-1]] * (rows - count)]], device=device)
        logits = self._run(block, 0)[0, :count]
        self.rewind(rows - count)
        return logits

    @property
    def most(self) -> int:
        """Proposals that a block has place for, here and now."""
        left = self.room - self.length
        if self._free is not None:
            left = min(left, self._free(self.length))
        return max((b - 1 for b in self.blocks if b <= left), default=0)

    def rewind(self, rows: int) -> None:
        """Take the last rows back: they are overwritten by the next ones."""
        if rows > 0:
            for layer in self.cache.layers[: self.depth]:
                layer.crop(-rows)
            self.length -= rows
            if self.positions is not None:
                self.positions = self.positions - rows

    def _next(self, count: int) -> tuple[int, int]:
        """Of `count` tokens that are left: those of the next call, and its rows."""
        if self.most_rows is not None:
            tokens = min(count, self.most_rows)
            return tokens, tokens
        tokens, rows = pieces(count)[0] if self.padded else (count, count)
        return tokens, rows if self.length + rows <= self.room else tokens  # no room to pad

    def _last(self, tokens: int, rows: int, ids: torch.Tensor) -> Any:
        """What to keep of a call's logits: the row of the last token."""
        if rows == tokens == 1 or not self.padded:
            return 1
        return torch.tensor([tokens - 1], device=ids.device)  # padded or not: one graph

    def _run(self, ids: torch.Tensor, keep: Any, at: torch.Tensor | None = None) -> torch.Tensor:
        given: dict[str, Any] = {"input_ids": ids, self.name: self.cache, "use_cache": True}
        if self.keeps:
            given["logits_to_keep"] = keep
        if self.mask is not None:
            given["attention_mask"] = self.mask
        if self.positions is not None:
            rows = torch.arange(ids.shape[1], device=ids.device)
            given["position_ids"] = self.positions + rows if at is None else at
            self.positions = self.positions + ids.shape[1]
        if ids.is_cuda:  # a captured graph may write over what its last run returned
            torch.compiler.cudagraph_mark_step_begin()
        logits: torch.Tensor = self.call(**given).logits
        self.length += ids.shape[1]
        return logits


def room_of(cache: Any) -> int:
    """Tokens that a cache of fixed size has room for; a sliding layer takes any number."""
    sizes = [layer.get_max_length() for layer in cache.layers if not layer.is_sliding]
    return int(min(sizes)) if sizes else 2**31


def can_take_back(cache: Any) -> bool:
    """Whether every layer of a cache gives rows back."""
    return all(layer.is_croppable for layer in cache.layers)


def _padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows [batch, n] with the last column repeated up to `size`, in memory of their own."""
    more = size - rows.shape[1]
    if not more:
        return rows.clone(memory_format=torch.contiguous_format)
    return torch.cat([rows, rows[:, -1:].expand(-1, more)], dim=1)

"""Random operations on a cache and on its list model, with canaries around the cache's memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sitsopt.graph.kv.layout import Layout
from sitsopt.graph.kv.state import CacheFull
from sitsopt.runtime.kv.layer import QuantizedLayer

from .list_cache import ListCache

GUARD, CANARY = 256, 0xA5
Step = Callable[[QuantizedLayer, Any, Any, Any, Any, float], torch.Tensor]
OPS = ["one", "one", "one", "some", "many", "crop", "reorder", "repeat", "select", "reset", "full"]


def eager(layer: QuantizedLayer, q: Any, k: Any, v: Any, mask: Any, scale: float) -> torch.Tensor:
    """As a model does: the cache's keys and values into PyTorch's attention."""
    keys, values = layer.update(k, v)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=grouped)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """f32 is what the list says; in 16 bits the kernel rounds queries and weights to 8, beside an outlier channel."""
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        return
    gap = (got - want).abs()
    assert gap.max() < 0.3 and gap.pow(2).mean().sqrt() < 0.03, (gap.max(), gap.pow(2).mean().sqrt())  # fmt: skip


class Case:
    """One random history. `step` is what attends and stores."""

    def __init__(self, seed: int, step: Step = eager, dtypes: tuple[Any, ...] = (torch.float32,)) -> None:  # fmt: skip
        self.rng, self.step = random.Random(seed), step
        pick = self.rng.choice
        self.dtype = pick(dtypes)
        self.make = torch.Generator().manual_seed(seed)
        self.batch, self.heads, self.group = pick([1, 3]), pick([1, 2, 4]), pick([1, 3])
        self.dim, self.max_len = pick([8, 36, 64]), pick([200, 256, 400])
        recent = pick([0, 16, 64, 130])
        budget, bits = pick([0.0, 0.05, 0.3]), pick([4, 4, 8])
        layout = Layout("f32", self.max_len, recent, bits, pick([0, 4]), pick([0.5, 0.75]), budget)
        self.layer = QuantizedLayer(layout)
        self.pads = [pick([0, 0, 5, 70]) for _ in range(self.batch)]
        self.model = ListCache(layout, self.batch, self.heads)
        self.fence()

    def run(self, count: int = 25) -> None:
        """So many operations, each compared."""
        self.append(self.rng.randint(1, 150))
        for _ in range(count):
            getattr(self, self.rng.choice(OPS))()
            self.compare()

    def fence(self) -> None:
        """Put the cache's memory between canaries."""
        layer = self.layer
        kv = torch.zeros(self.batch, self.heads, 0, self.dim, dtype=self.dtype)
        if not layer.is_initialized:
            layer.lazy_initialization(kv, kv)
        assert layer.state is not None
        self.around = torch.full((layer.state.numel() + 2 * GUARD,), CANARY, dtype=torch.uint8)
        inside = self.around[GUARD:-GUARD].view(layer.state.shape)
        layer.state = inside.copy_(layer.state)

    def compare(self) -> None:
        """Lengths, values and canaries."""
        assert int(self.layer.get_seq_length()) == self.model.length
        assert (self.around[:GUARD] == CANARY).all() and (self.around[-GUARD:] == CANARY).all()
        if not self.model.length:
            return
        read = self.layer.view().read(self.model.length)
        for name, got in zip(("keys", "values"), read, strict=True):
            want = self.model.read(name)
            torch.testing.assert_close(got[:, :, : self.model.length], want, rtol=1e-2 if self.dtype != torch.float32 else 1e-5, atol=1e-5)  # fmt: skip
            assert not got[:, :, self.model.length :].any()

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers with an outlier channel, as keys have."""
        x = torch.randn(shape, generator=self.make)
        x[..., 0] += 8.0
        return x.to(self.dtype)

    def append(self, tokens: int) -> None:
        """`tokens` more, attended by as many queries."""
        length, group = self.model.length, self.group
        tokens = min(tokens, self.max_len - length)
        if tokens < 1:
            return
        k, v = (self.random(self.batch, self.heads, tokens, self.dim) for _ in range(2))
        q = self.random(self.batch, self.heads * group, tokens, self.dim)
        mask = self.mask(tokens)
        scale = self.dim**-0.5
        out = self.step(self.layer, q, k, v, mask, scale)
        self.model.append(k, v)
        keys, values = self.model.read("keys"), self.model.read("values")
        here = mask[..., : length + tokens]
        wide = (t.double().repeat_interleave(group, 1) for t in (keys, values))
        wide_k, wide_v = wide
        scores = (q.double() @ wide_k.mT * scale).masked_fill(~here, -torch.inf)
        weights = F.softmax(scores, -1).nan_to_num(0.0)
        close(out.double(), weights @ wide_v, self.dtype)
        rows = [(i + 1) * tokens // min(tokens, 64) - 1 for i in range(min(tokens, 64))]
        summed = weights[:, :, rows].sum(2).unflatten(1, (self.heads, group)).sum(2)
        self.model.attended(summed, mask[:, 0, rows])

    def mask(self, tokens: int) -> torch.Tensor:
        """Causal, and closed where a row is padded."""
        place = torch.arange(self.max_len)
        query = self.model.length + torch.arange(tokens)
        causal = place <= query.unsqueeze(1)
        open_ = place >= torch.tensor(self.pads).unsqueeze(1)
        return causal[None, None] & open_[:, None, None]

    def one(self) -> None:
        """A token."""
        self.append(1)

    def some(self) -> None:
        """As a check of proposed tokens does."""
        self.append(self.rng.randint(2, 16))

    def many(self) -> None:
        """A chunk of a prompt."""
        self.append(self.rng.randint(17, 150))

    def crop(self) -> None:
        """Take back a few tokens, or many."""
        most = self.model.length
        count = min(most, self.rng.choice([0, 1, 5, 16, 70, most]))
        self.layer.crop(-count)
        self.model.crop(most - count)

    def reorder(self) -> None:
        """As beam search does."""
        rows = [self.rng.randrange(self.batch) for _ in range(self.batch)]
        self.layer.reorder_cache(torch.tensor(rows))
        self.take(rows, moved=False)

    def repeat(self) -> None:
        """Each row twice, in small batches."""
        if self.batch <= 3:
            self.layer.batch_repeat_interleave(2)
            self.take([r for r in range(self.batch) for _ in range(2)])

    def select(self) -> None:
        """Some rows."""
        rows = sorted(self.rng.sample(range(self.batch), self.rng.randint(1, self.batch)))
        self.layer.batch_select_indices(torch.tensor(rows))
        self.take(rows)

    def take(self, rows: list[int], moved: bool = True) -> None:
        """The same in the model."""
        self.model.rows = [copy.deepcopy(self.model.rows[r]) for r in rows]
        self.pads = [self.pads[r] for r in rows]
        self.batch = len(rows)
        if moved:
            self.fence()

    def reset(self) -> None:
        """Empty."""
        self.layer.reset()
        self.model.__init__(self.layer.layout, self.batch, self.heads)  # type: ignore[misc]

    def full(self) -> None:
        """More than fits: an error, and nothing has changed."""
        before = self.layer.state.clone()  # type: ignore[union-attr]
        tokens = self.max_len - self.model.length + 1
        k = self.random(self.batch, self.heads, tokens, self.dim)
        q = self.random(self.batch, self.heads * self.group, tokens, self.dim)
        mask = torch.ones(1, 1, tokens, self.max_len, dtype=torch.bool)
        with pytest.raises((CacheFull, RuntimeError), match="max_seq_len"):
            self.step(self.layer, q, k, k, mask, 1.0)
        assert torch.equal(before, self.layer.state)

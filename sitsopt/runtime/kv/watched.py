"""Keys that tell what attention does with them, for models that run without a compiler.

A cache hands out keys and never sees the queries. So in eager mode the keys are of a tensor class that follows
itself through the ops of a model's attention up to its softmax, or into `scaled_dot_product_attention`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# What stands between keys and the softmax of their scores, whatever the model's attention looks like.
FOLLOWED = {
    "__getitem__", "expand", "reshape", "view", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "flatten",
    "unflatten", "clone", "repeat_interleave", "repeat", "t", "mT", "swapaxes",
    "matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum",
    "mul", "mul_", "div", "div_", "add", "add_", "sub", "tanh", "to", "float", "type", "type_as", "half", "bfloat16",
    "__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__truediv__", "__imul__", "__iadd__", "__itruediv__",
    "masked_fill", "masked_fill_", "where", "cat", "__get__",
}  # fmt: skip
SOFTMAXES = {F.softmax, torch.softmax, torch.Tensor.softmax}

Told = Callable[[torch.Tensor, torch.Tensor | None], None]


class Watcher:
    """What is done with watched keys. Both are called at most once.

    attends(q, mask, scale, causal): before `scaled_dot_product_attention`.
    weighs(weights): the result of a softmax, [B, Hq, T, S] or with further columns behind.
    """

    def __init__(
        self, attends: Callable[..., None], weighs: Callable[[torch.Tensor], None]
    ) -> None:
        self._attends, self._weighs, self.done = attends, weighs, False

    def attends(self, *args: Any) -> None:
        """Once."""
        if not self.done:
            self.done = True
            self._attends(*args)

    def weighs(self, weights: torch.Tensor) -> None:
        """Once."""
        if not self.done:
            self.done = True
            self._weighs(weights)


class Watched(torch.Tensor):
    """Keys, or what attention has made of them so far."""

    watcher: Watcher

    @staticmethod
    def over(keys: torch.Tensor, watcher: Watcher) -> torch.Tensor:
        """`keys`, watched."""
        made = keys.as_subclass(Watched)
        made.watcher = watcher
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            watcher = _watcher(args, kwargs)
            if func is F.scaled_dot_product_attention:
                _attention(watcher, *args, **kwargs)
            result = func(*_plain(args), **_plain(kwargs))
            if watcher is None or watcher.done or not isinstance(result, torch.Tensor):
                return result
            if func in SOFTMAXES:
                watcher.weighs(result)
            elif getattr(func, "__name__", "") in FOLLOWED or func is operator.getitem:
                return Watched.over(result, watcher)
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, Watched):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _watcher(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watcher | None:
    flat = [*args, *kwargs.values()]
    flat += [v for value in flat if isinstance(value, (tuple, list)) for v in value]
    return next((v.watcher for v in flat if isinstance(v, Watched) and hasattr(v, "watcher")), None)


def _attention(
    watcher: Watcher | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    if watcher is not None and isinstance(key, Watched):
        watcher.attends(_plain(query), attn_mask, scale or query.shape[-1] ** -0.5, is_causal)

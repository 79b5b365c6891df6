"""The fixed text that models are measured on: Python's own language reference, which needs no download.

It is cut in two: the first 70 % is for calibration, perplexity is taken on the rest only. The text
changes with the Python version, so every result carries its digest.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from sitsopt.measure.errors import InputError

CALIBRATION_SHARE = 0.7

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three differences between a list and a tuple in Python.",
    "Translate to French: The weather is nice today.",
    "A train travels 120 km in 90 minutes. What is its average speed?",
    "Summarize the story of Romeo and Juliet in one paragraph.",
    "Give a recipe for pancakes with at most five ingredients.",
)


@functools.cache
def corpus() -> str:
    """The whole text: every topic of `pydoc_data.topics`, in order of its name."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def digest() -> str:
    """Twelve hex digits that name the text, for a result to carry."""
    return hashlib.sha256(corpus().encode()).hexdigest()[:12]


def calibration_text() -> str:
    """The part that weights and caches may be tuned on."""
    return corpus()[: _cut()]


def evaluation_text() -> str:
    """The part that nothing is tuned on."""
    return corpus()[_cut() :]


def _cut() -> int:
    # On a topic's border, so that no sentence is seen by both parts.
    return corpus().index("\n\n", int(len(corpus()) * CALIBRATION_SHARE))


def windows(tokenizer: Any, n_tokens: int = 16384, window: int = 512) -> torch.Tensor:
    """`n_tokens` of the evaluation text as rows of `window` token ids."""
    rows = n_tokens // window
    if rows < 1:
        raise InputError(f"{n_tokens} tokens hold no window of {window}")
    return _take(tokenizer, evaluation_text(), rows * window).view(rows, window)


def context(tokenizer: Any, length: int) -> torch.Tensor:
    """One row of `length` token ids of running text, repeated when the text is shorter."""
    return _take(tokenizer, corpus(), length, repeat=True).view(1, length)


def context_for(loaded: Any, length: int) -> torch.Tensor:
    """`context` for a loaded model, on its device; scattered ids for a model without a tokenizer."""
    if loaded.tokenizer is not None:
        return context(loaded.tokenizer, length).to(loaded.device)
    vocabulary = loaded.model.get_input_embeddings().num_embeddings
    return (torch.arange(length, device=loaded.device) * 7919 % vocabulary).view(1, length)


def prompts(tokenizer: Any, count: int = len(PROMPTS), length: int = 512) -> torch.Tensor:
    """The first `count` shipped prompts, each after text that fills it up to `length` token ids.

    One length for all is one compiled prefill for all, and greedy tokens then also depend on a
    context of that length.
    """
    text = encode(tokenizer, calibration_text()[: 8 * length * count])
    if len(text) < length * count:
        text = text * (length * count // len(text) + 1)
    rows = []
    for number, prompt in enumerate(PROMPTS[:count]):
        before = text[number * length : (number + 1) * length]
        rows.append([*before, *encode(tokenizer, f"\n\nQuestion: {prompt}\nAnswer:")][-length:])
    return torch.tensor(rows, dtype=torch.long)


KINDS = ("copy", "code", "open")
OPEN = (
    "Tell a story about a lighthouse keeper who finds a letter in a bottle, and what she does next."
)


def of_kind(loaded: Any, kind: str, length: int) -> torch.Tensor:
    """One row of at most `length` token ids that a model goes on from: `copy`, a passage that has begun to say itself
    again; `code`, the source of a module of Python; `open`, a question with no text to copy from; else the beginning of
    a file. Raises InputError for a file that is not text, and for a model without a tokenizer."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise InputError(f"{loaded.name} came without a tokenizer: --text reads text")
    if kind == "open":
        return chat(tokenizer, OPEN, loaded.device)[:, -length:].contiguous()
    if kind == "copy":
        passage = encode(tokenizer, evaluation_text()[: 8 * length])[: max(1, length * 4 // 9)]
        return _row((passage * 3)[:length], loaded)
    if kind == "code":
        import inspect
        import textwrap

        return _row(encode(tokenizer, inspect.getsource(textwrap))[:length], loaded)
    try:
        found = Path(kind).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{kind}: {error}") from error
    ids = encode(tokenizer, found[: 16 * length])[:length]
    if not ids:
        raise InputError(f"{kind} holds no text")
    return _row(ids, loaded)


def _row(ids: list[int], loaded: Any) -> torch.Tensor:
    return torch.tensor([ids], dtype=torch.long, device=loaded.device)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def chat(tokenizer: Any, prompt: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """One row of token ids for a user's message: the model's chat template where it has one."""
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    # A fresh contiguous row: size-1 strides that differ between rows make Dynamo compile again.
    return ids.reshape(1, -1).contiguous().to(device)


def _take(tokenizer: Any, text: str, n_tokens: int, repeat: bool = False) -> torch.Tensor:
    # A token of English is four characters; eight are enough, and the whole text if they are not.
    ids = encode(tokenizer, text[: 8 * n_tokens])
    if len(ids) < n_tokens:
        ids = encode(tokenizer, text)
    if len(ids) < n_tokens:
        if not repeat:
            raise InputError(f"the text has {len(ids)} tokens, {n_tokens} are needed")
        ids = ids * (n_tokens // len(ids) + 1)
    return torch.tensor(ids[:n_tokens], dtype=torch.long)

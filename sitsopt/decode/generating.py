"""The loop behind `model.generate()`: transformers prepares everything, and this decodes.

transformers' `generate` builds processors, stopping criteria, masks, positions and the cache, and hands them to
`custom_generate`. What the loop does not do (beams, encoders, caches that grow, ...) it hands on to transformers'
own method, and the record says why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..rewrite.record import Record
from ..runtime.kv.cache import QuantizedKVCache
from .fitting import FAST, lay_out, runner_of, why_plain, windows
from .loop import Loop, Speculation, Stop
from .picker import Picker
from .runner import Runner, room_of
from .sizes import cache_length

# Arguments that choose a way of decoding that is not this loop's, or need what only transformers' loop is given.
OTHERS = {
    "num_beams": "beam search", "num_beam_groups": "beam search", "constraints": "constrained beam search",
    "penalty_alpha": "contrastive search", "dola_layers": "DoLa decoding", "assistant_model": "assisted decoding",
    "assistant_early_exit": "assisted decoding", "prompt_lookup_num_tokens": "transformers' own prompt lookup",
    "stop_strings": "stop strings", "token_healing": "token healing", "custom_generate": "a generate of the caller's",
    "synced_gpus": "several GPUs in step", "prefill_chunk_size": "a prefill in chunks that the caller chose",
}  # fmt: skip
PLAIN_INPUTS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}  # fmt: skip

_CACHES: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Generating:
    """Decoding for one model. record: told which loop ran. speculate: what makes the speculation of an answer."""

    def __init__(self, record: Record, speculation: Speculation | None = None) -> None:
        self.record, self.speculation = record, speculation

    def generate(
        self, model: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As `own`, the class's `generate`."""
        ours = _with_stop_strings(args, kwargs)
        why = _another_way(model, args, ours)
        if why:
            self.told("transformers", why)
            return own(model, *args, **kwargs)
        streamer = kwargs.get("streamer")

        def decode(
            model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
            **rest: Any,
        ) -> Any:  # fmt: skip
            given = (input_ids, logits_processor, stopping_criteria, generation_config)
            return self._decode(model, given, streamer, rest)

        return own(model, *args, **ours, custom_generate=decode)

    def plain(self, call: Any = None) -> str:
        """Speculate no more; what the guard says it did."""
        self.speculation = None
        return "tokens are decoded one by one"

    def told(self, loop: str, why: str) -> None:
        """Note which loop runs."""
        self.record.loop, self.record.loop_why = loop, why

    def _decode(self, model: Any, given: Any, streamer: Any, rest: dict[str, Any]) -> Any:
        ids, processors, criteria, config = given
        why = _not_ours(model, ids, config, rest)
        if why:
            self.told("transformers", why)
            return type(model)._sample(
                model, ids, logits_processor=processors, stopping_criteria=criteria,
                generation_config=config, streamer=streamer, **rest,
            )  # fmt: skip
        self.told("fast", FAST)
        key = next(k for k in ("cache", "past_key_values") if rest.get(k) is not None)
        lent = _lend(model, rest[key], ids, config)
        try:
            return self._run(model, given, streamer, rest, lent or rest[key])
        finally:
            given_back = not config.return_dict_in_generate
            if (
                lent is not None and given_back and _kinds(lent) == {"StaticLayer"}
            ):  # a guard may have put in others
                _CACHES.setdefault(model, {})[_key(lent)] = lent

    def _run(self, model: Any, given: Any, streamer: Any, rest: dict[str, Any], cache: Any) -> Any:
        ids, processors, criteria, config = given
        spec = self._speculation(ids, cache)
        runner, new, positions = prepared(model, cache, ids, config, rest, spec)
        whole = config.return_dict_in_generate
        picker = Picker(
            processors, config.do_sample, spec is not None,
            whole and config.output_scores, whole and config.output_logits,
        )  # fmt: skip
        buffer = ids.new_empty(len(ids), max(criteria.max_length or runner.room, ids.shape[1] + 1))
        buffer[:, : ids.shape[1]] = ids
        pad = config._pad_token_tensor
        ends = any(hasattr(one, "eos_token_id") for one in criteria)
        loop = Loop(
            runner, buffer, ids.shape[1], picker, stop_of(criteria, len(ids)),
            pad=pad.to(ids.device) if ends and len(ids) > 1 else None,
            put=None if streamer is None else lambda tokens: streamer.put(tokens.cpu()),
            speculation=spec,
        )  # fmt: skip
        found = loop.run(runner.prefill(new, positions)).clone()
        if streamer is not None:
            streamer.end()
        if not whole:
            return found
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(
            sequences=found,
            scores=None if picker.scores is None else tuple(picker.scores),
            logits=None if picker.logits is None else tuple(picker.logits),
            cache=cache,
        )

    def _speculation(self, ids: torch.Tensor, cache: Any) -> Speculation | None:
        """What speculates in this answer, or None; the record says why not."""
        spec = self.speculation
        if spec is None:
            return None
        why = why_plain(cache, len(ids))
        self.record.speculation = f"not used: {why}" if why else spec.draft.name
        return None if why else spec


def prepared(
    model: Any, cache: Any, ids: torch.Tensor, config: Any, rest: dict[str, Any], spec: Speculation | None
) -> tuple[Runner, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The runner, the tokens that are not in the cache yet, and their positions where the model cannot count them."""
    mask, positions, past = (
        rest.get("attention_mask"),
        rest.get("position_ids"),
        int(cache.get_seq_length()),
    )
    new = ids
    shown = mask.shape[1] if mask is not None else getattr(config, "_mask_length", -1)
    if past and shown == ids.shape[1]:  # the caller repeats what the cache holds
        new = ids[:, past:]
    count = new.shape[1]
    counted = torch.arange(past, past + count, device=ids.device)
    if positions is not None:
        positions = positions[:, -count:]
        if mask is None and not windows(cache) and bool((positions == counted).all()):
            positions = None  # the model counts so itself
    elif mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -count:]
    room = min(room_of(cache), shown + config.max_length)  # a window has room for any number
    if mask is not None:
        whole = mask.new_ones(len(ids), room)  # what is not written yet is hidden by its place
        whole[:, : mask.shape[1]] = mask
        mask = whole
    elif positions is not None:
        mask = ids.new_ones(len(ids), room)
    at = None if positions is None else positions[:, :1]
    runner = runner_of(model, model, cache, spec.most if spec else 0, mask, at)
    return runner, new, positions


def _with_stop_strings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Stop strings of a call as the criterion that they are: transformers loses the tokenizer on the way to a
    `custom_generate`."""
    strings, tokenizer = kwargs.get("stop_strings"), kwargs.get("tokenizer")
    if strings is None or tokenizer is None or len(args) > 3:
        return kwargs
    from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

    rest = {k: v for k, v in kwargs.items() if k not in ("stop_strings", "tokenizer")}
    criterion = StopStringCriteria(tokenizer, strings)
    given = rest.get("stopping_criteria") or ()
    return {**rest, "stopping_criteria": StoppingCriteriaList([*given, criterion])}


def _another_way(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call is none for this loop, by its arguments; empty if it is one."""
    configs = [model.generation_config, kwargs.get("generation_config"), *args[1:2]]
    wanted = [kwargs, *(vars(config) for config in configs if config is not None)]
    for name, what in OTHERS.items():
        for one in wanted:
            value = one.get(name)
            if (
                value is not None
                and value is not False
                and not (name.startswith("num_") and value == 1)
            ):
                return f"{what} (`{name}`)"
            if value is not None:
                break  # the call's own word counts
    return ""


def _not_ours(model: Any, ids: torch.Tensor, config: Any, rest: dict[str, Any]) -> str:
    """Why what transformers prepared is not decoded here; empty if it is."""
    from transformers import StaticCache

    cache = rest.get("cache", rest.get("past_key_values"))
    others = [k for k, v in rest.items() if v is not None and k not in PLAIN_INPUTS]
    masks = rest.get("attention_mask"), rest.get("position_ids")
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder"
    if type(cache) not in (StaticCache, QuantizedKVCache):
        return (
            f"the cache is a {type(cache).__name__}, which has no fixed size"
            if cache is not None
            else "no cache"
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "attentions or hidden states are returned"
    if others:
        return f"inputs beside the tokens: {', '.join(others)}"
    if ids.ndim != 2 or ids.shape[1] == 0 or ids.device != model.device:
        return "tokens of another shape or on another device"
    if any(m is not None and m.ndim != 2 for m in masks):
        return "a mask or positions of more than two dimensions"
    kinds = _kinds(cache)
    if not kinds <= {"StaticLayer", "StaticSlidingWindowLayer", "QuantizedLayer"}:
        return f"layers that are no attention over a cache: {', '.join(sorted(kinds))}"
    return ""


def _kinds(cache: Any) -> set[str]:
    return {type(layer).__name__ for layer in cache.layers}


def _key(cache: Any) -> tuple[int, int]:
    return cache.layers[0].batch_size, cache.layers[0].max_cache_len


def _lend(model: Any, cache: Any, ids: torch.Tensor, config: Any) -> Any:
    """A cache of a size that is compiled, in place of an untouched one that transformers made for this call; None where
    the caller gave one."""
    from transformers import StaticCache

    if (
        getattr(cache, "_is_user_defined", False)
        or type(cache) is not StaticCache
        or cache.is_initialized
    ):
        return None
    if any(layer.is_sliding for layer in cache.layers):
        return None
    text = model.config.get_text_config(decoder=True)
    length = cache_length(config.max_length, getattr(text, "max_position_embeddings", None))
    found = _CACHES.get(model, {}).pop((len(ids), length), None)  # out while it is in use
    if found is None or found.layers[0].device != model.device or found.layers[0].keys.dtype != model.dtype:  # fmt: skip
        found = StaticCache(config=text, max_cache_len=length)
        lay_out(model, found, len(ids))
    found.reset()
    return found


def stop_of(criteria: Any, batch: int) -> Stop:
    """Stopping criteria as one function; length and end of one sequence are compared as numbers."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    if batch > 1 or any(type(one) not in (EosTokenCriteria, MaxLengthCriteria) for one in criteria):
        stop: Stop = criteria
        return stop
    ends = {
        int(t) for c in criteria if hasattr(c, "eos_token_id") for t in c.eos_token_id.flatten()
    }
    most = criteria.max_length
    answers = [torch.tensor([False]), torch.tensor([True])]

    def stopped(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if answers[0].device != ids.device:
            answers[:] = [one.to(ids.device) for one in answers]
        long = most is not None and ids.shape[1] >= most
        return answers[long or (bool(ends) and int(ids[0, -1]) in ends)]

    return stopped


def install(model: Any, record: Record, speculation: Speculation | None = None) -> Generating:
    """Make this loop the one of `model.generate()`, as far as `run` is asked for it."""
    found = _LOOPS[model] = Generating(record, speculation)
    return found


def run(model: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`own`, the `generate` of the model's class, through the loop that is installed, if one is."""
    loop = _LOOPS.get(model)
    if loop is None:
        return own(model, *args, **kwargs)
    return loop.generate(model, own, args, kwargs)


_LOOPS: weakref.WeakKeyDictionary[Any, Generating] = weakref.WeakKeyDictionary()

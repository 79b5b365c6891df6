"""Tiny models with random weights: the unmodified classes of transformers, two layers each.

    model = build("llama", attn="eager")
    args, kwargs = call(model, "decode")

Sizes are chosen so that no two dimensions of one tensor coincide where the architecture allows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sitsopt import QuantizedKVCache

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 96, 6, 2, 16, 112, 67, 2
BATCH, PROMPT, CACHE = 3, 5, 11

LM = {
    "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OWN_HEADS = {k: v for k, v in LM.items() if k not in ("num_key_value_heads", "head_dim")}
GPT2 = {
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "vocab_size": VOCAB,
    "n_positions": 64,
}
T5 = {
    "d_model": HIDDEN, "d_kv": HEAD_DIM, "d_ff": MLP, "num_layers": LAYERS, "num_heads": HEADS,
    "num_decoder_layers": LAYERS, "vocab_size": VOCAB, "decoder_start_token_id": 0,
}  # fmt: skip
ENCODER = {
    "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}  # fmt: skip
WHISPER = {
    "d_model": HIDDEN, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": MLP, "decoder_ffn_dim": MLP, "vocab_size": VOCAB,
    "num_mel_bins": 8, "max_source_positions": 14, "max_target_positions": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

# name: (config class, model class, arguments of the config)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LM),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**LM, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", OWN_HEADS | {"num_key_value_heads": KV_HEADS}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LM),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", LM),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**LM, "sliding_window": 7}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {
        **LM, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**OWN_HEADS, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", OWN_HEADS | {"num_key_value_heads": KV_HEADS}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT2, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", OWN_HEADS),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", OWN_HEADS | {"num_key_value_heads": KV_HEADS}),
    "cohere": ("CohereConfig", "CohereForCausalLM", OWN_HEADS | {"num_key_value_heads": KV_HEADS}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", OWN_HEADS | {"num_key_value_heads": KV_HEADS}),
    "glm": ("GlmConfig", "GlmForCausalLM", LM),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {
        **OWN_HEADS, "num_key_value_heads": KV_HEADS, "attention_multiplier": 0.2}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {
        **OWN_HEADS, "num_key_value_heads": KV_HEADS}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", OWN_HEADS | {"num_key_value_heads": KV_HEADS}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {
        **LM, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "opt": ("OPTConfig", "OPTForCausalLM", {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "ffn_dim": MLP,
        "vocab_size": VOCAB, "max_position_embeddings": 64, "word_embed_proj_dim": HIDDEN}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {
        "hidden_size": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": VOCAB}),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "flan_t5": ("T5Config", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "bert": ("BertConfig", "BertModel", {**ENCODER, "vocab_size": VOCAB}),
    "roberta": ("RobertaConfig", "RobertaModel", {**ENCODER, "vocab_size": VOCAB}),
    "distilbert": ("DistilBertConfig", "DistilBertModel", {
        "dim": HIDDEN, "hidden_dim": MLP, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCAB}),
    "vit": ("ViTConfig", "ViTModel", {**ENCODER, "image_size": 12, "patch_size": 4}),
    "clip": ("CLIPTextConfig", "CLIPTextModel", {**ENCODER, "vocab_size": VOCAB}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER),
    "imagegpt": ("ImageGPTConfig", "ImageGPTModel", GPT2),
    "falcon": ("FalconConfig", "FalconForCausalLM", {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCAB}),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", OWN_HEADS | {"num_key_value_heads": KV_HEADS}),
    "deberta": ("DebertaConfig", "DebertaModel", {**ENCODER, "vocab_size": VOCAB}),
    "swin": ("SwinConfig", "SwinModel", {
        "image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3],
        "window_size": 4}),
    "janus_vqvae": ("JanusVQVAEConfig", "JanusVQVAE", {
        "embed_dim": 8, "num_embeddings": 32, "latent_channels": 32, "num_patches": 4, "base_channels": 32,
        "channel_multiplier": [1, 1], "num_res_blocks": 1, "image_size": 8}),
    "roc_bert": ("RoCBertConfig", "RoCBertModel", {
        **ENCODER, "vocab_size": VOCAB, "pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB,
        "pronunciation_embed_dim": 8, "shape_embed_dim": 12}),
    "xlnet": ("XLNetConfig", "XLNetModel", {
        "vocab_size": VOCAB, "d_model": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "d_inner": MLP}),
    "canine": ("CanineConfig", "CanineModel", {
        **ENCODER, "num_hash_buckets": 32, "max_position_embeddings": 64, "downsampling_rate": 2}),
    "cvt": ("CvtConfig", "CvtModel", {
        "embed_dim": [8, 16], "num_heads": [1, 2], "depth": [1, 2], "drop_path_rate": [0.0, 0.0]}),
    "levit": ("LevitConfig", "LevitModel", {
        "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1], "key_dim": [8, 8, 8], "drop_path_rate": 0}),
    "resnet": ("ResNetConfig", "ResNetModel", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}),
}  # fmt: skip

DECODERS = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt2", "gptj",
    "gpt_neox", "stablelm", "cohere", "olmo2", "glm", "granite", "starcoder2", "smollm3", "gpt_oss", "opt",
]  # fmt: skip


def build(
    name: str, attn: str = "sdpa", dtype: torch.dtype = torch.float32, layers: int = LAYERS
) -> nn.Module:
    """The model in eval mode. `attn` is sdpa or eager; a class without that choice ignores it."""
    import transformers

    config_name, model_name, arguments = MODELS[name]
    kwargs = dict(arguments)
    for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "n_layers"):
        if key in kwargs:
            kwargs[key] = layers
    if "layer_types" in kwargs:
        kwargs["layer_types"] = (kwargs["layer_types"] * layers)[:layers]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**kwargs)
    make = getattr(transformers, model_name)
    try:
        config._attn_implementation = attn
        model = make(config)
    except ValueError:  # a class that has one attention only
        config._attn_implementation = "eager"
        model = make(config)
    model = model.to(dtype).eval()
    _stir(model)
    return model


def _stir(model: nn.Module) -> None:
    """Gains, biases and statistics start as ones and zeros, which hide a lost factor or term."""
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
        for name, value in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                value.add_(torch.rand_like(value) * 0.5)


def call(model: nn.Module, phase: str = "forward") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one call: `forward` without a cache, `prefill` and `decode` on a static one,
    `quantized` a step on a `QuantizedKVCache`."""
    torch.manual_seed(1)
    takes = inspect.signature(model.forward).parameters
    if "pixel_values" in takes and "input_ids" not in takes:
        size = getattr(model.config, "image_size", 32)
        return (torch.randn(BATCH, 3, size, size, dtype=_dtype(model)),), {}
    if "input_features" in takes:
        audio = torch.randn(BATCH, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        ids = torch.randint(3, VOCAB, (BATCH, PROMPT))
        return (audio.to(_dtype(model)),), {"decoder_input_ids": ids, "use_cache": False}
    ids = torch.randint(3, VOCAB, (BATCH, PROMPT))
    if phase == "forward":
        extra = (
            {"decoder_input_ids": ids[:, :4].contiguous()} if "decoder_input_ids" in takes else {}
        )
        if "use_cache" in takes or extra:
            extra["use_cache"] = False
        return (ids,), extra
    cache = static_cache(model)
    if phase == "quantized":
        cache = QuantizedKVCache(model.config, 128, window=16, hot_budget=0.1)
        cache.prepare(model, BATCH)
    if phase in ("decode", "quantized"):
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        ids = ids[:, :1].clone(memory_format=torch.contiguous_format)
    return (ids,), {"past_key_values": cache, "use_cache": True}


def static_cache(model: nn.Module, length: int = CACHE, batch: int = BATCH) -> Any:
    """A static cache whose buffers exist already, as `generate` leaves it after the first call."""
    from transformers import StaticCache

    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(batch, heads, width, _dtype(model), torch.device("cpu"))
    return cache


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def compiled_graphs(
    model: nn.Module, phase: str, backend: Callable[[Any, Any], Any], grad: bool = False
) -> Any:
    """Run one call under Dynamo with `backend`; the outputs. Every compiled graph goes through it."""
    args, kwargs = call(model, phase)
    torch._dynamo.reset()
    run = torch.compile(model, backend=backend)
    with torch.set_grad_enabled(grad):
        return run(*args, **kwargs)

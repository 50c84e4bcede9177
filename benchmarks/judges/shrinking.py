"""Any architecture of transformers, small: a config by the names of its fields, inputs by those of its forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

WIDTH, HEADS, LAYERS, VOCABULARY, IMAGE = 32, 2, 2, 99, 32
BATCH, TOKENS, MOST_PARAMETERS = 4, 24, 6_000_000
NUMBERS: tuple[tuple[str, int], ...] = (
    (r"vocab_size$|^entity_vocab_size", VOCABULARY),
    (r"(num_|n_)?(attention_|kv_|key_value_)?heads$|^n_head$|_heads$|_head$|^num_head$", HEADS),
    (r"experts_per_tok|^moe_k$|^moe_topk$|num_experts_per_token|^top_?k$", 2),
    (r"^n_group$|^topk_group$|^n_shared_experts$|^first_k_dense_replace$", 1),
    (r"experts$", 4),
    (r"layers$|^n_layer$|^depth$|_depth$|num_blocks$|_layer$", LAYERS),
    (r"head_dim$|head_size$|^d_kv$|_lora_rank$|kv_channels", 16),
    (r"window_size$", 4),
    (r"intermediate|ffn|d_ff|n_inner|mlp_dim|feed_?forward|inner_dim|hidden_size_mlp", 2 * WIDTH),
    (r"d_model|n_embd|embed_dim|hidden_dim|hidden_size|embedding_size|_dim$|^dim$|_dimension$|out_channels", WIDTH),
    (r"image_size$|^img_size$", IMAGE),
    (r"patch_size$", 8),
    (r"max_position_embeddings|n_positions|max_source_positions|max_target_positions", 128),
)
"""The first pattern that a field's name has says what number it becomes, where its own is larger."""


def small_fields(config: PretrainedConfig, *, widths: bool = True) -> dict[str, Any]:
    """Arguments for the config's class: what is large in it made small, within its parts too."""
    fields: dict[str, Any] = {}
    tokens = iter(range(VOCABULARY - 1, 0, -1))
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "architectures", "dtype"):
            continue
        if isinstance(value, PretrainedConfig):
            fields[name] = small_fields(value, widths=widths) | {"model_type": value.model_type}
        elif re.search(r"_token_id$|_token_index$", name) and isinstance(value, int):
            fields[name] = value if 0 <= value < VOCABULARY // 3 else next(tokens)
        elif "dropout" in name and isinstance(value, float):
            fields[name] = value or 0.1
        elif (small := _small(name, value, widths)) is not None:
            fields[name] = small
    return fields


def _small(name: str, value: Any, widths: bool) -> Any:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        for pattern, number in NUMBERS:
            if re.search(pattern, name):
                keeps = not widths and number not in (LAYERS, VOCABULARY)
                return None if value <= number or keeps else number
        return None
    if not isinstance(value, list | tuple) or not value or not all(type(one) is int for one in value):
        return None
    if re.search(r"depths$|layers$|num_blocks$", name):
        return type(value)([1] * len(value))
    if re.search(r"image_size|img_size", name):
        return type(value)([IMAGE] * len(value))
    if widths and re.search(r"hidden_sizes|embed_dims?$|channels|dims?$|widths|hidden_size", name):
        return type(value)(max(8, one * 64 // max(value) // 8 * 8) for one in value)
    if widths and re.search(r"heads$", name):
        return type(value)(min(one, 2) for one in value)
    return None


def configs(kind: type[PretrainedConfig]) -> Iterator[PretrainedConfig]:
    """Small ones of the class, the smallest first."""
    for widths in (True, False):
        try:
            yield kind(**small_fields(kind(), widths=widths))
        except Exception as error:
            reason = error
    try:
        yield kind()
    except Exception:
        raise reason from None


def built(model_class: Any, config: PretrainedConfig) -> nn.Module:
    """The model, in train mode; counted without memory first. Raises ``ValueError`` where it is too large."""
    with torch.device("meta"):
        count = sum(one.numel() for one in model_class._from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"too large: {count} parameters")
    model: nn.Module = model_class._from_config(config).float()
    return model.train()


def _of(config: PretrainedConfig, names: tuple[str, ...], default: Any) -> Any:
    """The first of these that the config or a part of it has."""
    parts = [config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))]
    for name in names:
        for part in parts:
            found = getattr(part, name, None)
            if found is not None:
                return found
    return default


def inputs(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """What its forward may want, by the names of its arguments: the most first."""
    config: Any = model.config
    known = inspect.signature(model.forward).parameters
    size = _of(config, ("image_size", "img_size"), IMAGE)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels, bins = _of(config, ("num_channels", "in_chans", "in_channels"), 3), _of(config, ("num_mel_bins",), 80)
    frames = 2 * _of(config, ("max_source_positions",), 50)
    words = min(_of(config, ("vocab_size",), VOCABULARY), VOCABULARY) // 2

    def tokens(length: int = TOKENS) -> torch.Tensor:
        return torch.randint(3, words, (BATCH, length))

    text = {"input_ids": tokens()} if "input_ids" in known else {}
    if "decoder_input_ids" in known:
        text["decoder_input_ids"] = tokens(8)
    image = {"pixel_values": torch.randn(BATCH, channels, height, width)} if "pixel_values" in known else {}
    sounds: list[Callable[[], dict[str, torch.Tensor]]] = []
    for name in ("input_features", "input_values", "inputs_embeds"):
        if name in known:
            shapes = [(BATCH, bins, frames), (BATCH, frames, bins), (BATCH, 4000), (BATCH, 1, 4000)]
            shapes = [(BATCH, TOKENS, _of(config, ("hidden_size", "d_model"), WIDTH))] if "embeds" in name else shapes
            sounds += [lambda name=name, shape=shape: {name: torch.randn(shape)} for shape in shapes]  # type: ignore[misc]
    if text and image:
        yield text | image
    for one in (text, image):
        if one:
            yield one
    decoded = {"decoder_input_ids": tokens(8)} if "decoder_input_ids" in known else {}
    for sound in sounds:
        yield sound() | decoded


def loss_of(outputs: Any) -> torch.Tensor:
    """Mean squares of all that takes a gradient, at most so many tensors deep."""
    found = [one for one in _tensors(outputs) if one.is_floating_point() and one.requires_grad]
    if not found:
        raise ValueError("nothing that it gives takes a gradient")
    return torch.stack([one.float().square().mean() for one in found]).sum()


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for one in thing.values():
            yield from _tensors(one)
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from _tensors(one)

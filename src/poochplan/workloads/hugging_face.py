"""``hf:NAME``: any model of Hugging Face transformers by the name of its configuration, with random weights and data.

``hf:llama`` is what ``LlamaConfig()`` describes (7B). ``--set`` changes fields of the configuration by their names.
With ``--mode fake`` nothing of the model takes memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch

from poochplan.errors import UsageError, did_you_mean, named_line
from poochplan.runtime.devices.opening import usable_device
from poochplan.tensors.storages import FakeMemory
from poochplan.torch_private.tensor_internals import mode_stack
from poochplan.workload import Workload

from .common import make_optimizer, require, seeded

PREFIX = "hf:"
Precision = Literal["float32", "bfloat16", "autocast"]

_TASKS = ("IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM")
"""What a model is trained for, by the names of transformers; of several the first."""
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")


def function_of(target: str) -> Callable[..., Workload]:
    """The function that builds ``hf:NAME``. Raises ``UsageError`` if transformers has no such configuration, or none of
    its models for it is trained on text, images or speech.
    """
    name = target.removeprefix(PREFIX)
    mapping = require("transformers").CONFIG_MAPPING
    if name not in mapping:
        hint = did_you_mean(target, (f"{PREFIX}{one}" for one in mapping)) or "; such as hf:llama, hf:vit or hf:whisper"
        raise UsageError(f"{target}: expected the name of a configuration of transformers, found {name!r}{hint}")
    if _class_name(name) is None:
        raise UsageError(
            f"{target}: expected a model of text, images or speech, found one that transformers has no such head for; "
            "write a function that returns a poochplan.Workload"
        )
    return partial(transformer, name)


def transformer(
    name: str,
    /,
    *,
    batch_size: int = 1,
    length: int = 512,
    layers: int | None = None,
    precision: Precision = "float32",
    optimizer: str = "adamw",
    lr: float = 1e-4,
    seed: int = 0,
    device: str = "cpu",
    **config: Any,
) -> Workload:
    """A model of transformers and its step on made-up data.

    Parameters
    ----------
    length: tokens of each text; of a speech model, tokens that are written.
    layers: number of layers, of encoder and decoder each; the configuration's own by default.
    precision: ``"bfloat16"``: parameters and computation; ``"autocast"``: float32 parameters under autocast to it.
    config: fields of the configuration, such as ``hidden_size``.

    Raises
    ------
    UsageError
        The configuration has no such field, or transformers refuses its values.
    """
    where, data = usable_device(device), seeded(seed)
    configuration = _configuration(name, layers, length, config)
    model_class = getattr(require("transformers"), str(_class_name(name)))
    with _uninitialised():
        model = model_class(configuration).train()
    if model.loss_type is None:  # transformers knows a task by the class's name, and warns of GPT-2's
        model.loss_type = "ForCausalLM"
    model = model.to(where, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    inputs = _inputs(configuration, model.main_input_name, batch_size, length, data)
    batch = {key: one.to(where, model.dtype if one.is_floating_point() else one.dtype) for key, one in inputs.items()}

    def step() -> torch.Tensor:
        is_cast = precision == "autocast"
        with torch.autocast(where.type, torch.bfloat16) if is_cast else contextlib.nullcontext():  # or the caller's
            loss: torch.Tensor = model(**batch).loss
        return loss

    return Workload(model, step, make_optimizer(optimizer, model, lr))


def _class_name(name: str) -> str | None:
    """Of the model's class for the first task that it has."""
    modeling_auto = require("transformers.models.auto.modeling_auto")
    for task in _TASKS:
        found = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(name)
        if found is not None:
            return str(found if isinstance(found, str) else found[0])
    return None


def _configuration(name: str, layers: int | None, length: int, fields: dict[str, Any]) -> Any:
    config_class = require("transformers").CONFIG_MAPPING[name]
    usual = config_class()
    known = {*usual.to_dict(), *usual.attribute_map}
    for key in fields:
        if key not in known and not isinstance(getattr(usual, key, None), (int, str)):  # num_labels is a property
            hint = did_you_mean(key, known) or f"; see {config_class.__name__} of transformers"
            raise UsageError(f"{PREFIX}{name}: unknown parameter {key!r}{hint}")
    if layers is not None:
        fields = {key: layers for key in _LAYERS if hasattr(usual, key)} | fields
    positions = getattr(usual, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < length:
        fields = {"max_position_embeddings": length} | fields
    if usual.is_encoder_decoder and getattr(usual, "decoder_start_token_id", None) is None:
        fields = {"decoder_start_token_id": 0} | fields
    try:
        return config_class(**{"use_cache": False} | fields)  # a cache would outlive the forward pass
    except Exception as error:
        raise UsageError(f"{PREFIX}{name}: transformers refuses these fields: {named_line(error)}") from error


def _inputs(config: Any, main: str, batch_size: int, length: int, data: torch.Generator) -> dict[str, torch.Tensor]:
    """Random inputs and labels: pixels ``[batch, channels, height, width]``, features of speech ``[batch, mel bins,
    frames]``, or tokens ``[batch, length]``.
    """
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)  # ImageNet's, for networks that take any
        sides = size if isinstance(size, (list, tuple)) else [size] * 2
        pixels = torch.randn(batch_size, config.num_channels, *sides, generator=data)
        return {main: pixels, "labels": torch.randint(config.num_labels, (batch_size,), generator=data)}
    tokens = torch.randint(1, config.vocab_size, (batch_size, length), generator=data)
    if main == "input_features":
        frames = 2 * config.max_source_positions
        return {main: torch.randn(batch_size, config.num_mel_bins, frames, generator=data), "labels": tokens}
    return {main: tokens, "labels": tokens}


@contextlib.contextmanager
def _uninitialised() -> Iterator[None]:
    """Without memory, weights get no values: an initialiser may ask for one of them."""
    if not any(isinstance(mode, FakeMemory) for mode in mode_stack()):
        yield
        return
    before_5 = getattr(require("transformers.modeling_utils"), "no_init_weights", None)
    with (before_5 or require("transformers.initialization").no_init_weights)():
        yield

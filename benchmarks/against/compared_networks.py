"""The networks of ``benchmarks/compare.py``: a step of 0.2 to 0.6 s on two cores, and which modules are their blocks.

Blocks are what a user would hand to ``torch.utils.checkpoint``: layers of transformers, bottlenecks, levels of a U-Net.
Weights are random, modes are those of training with dropout on, and each network is built anew from the same seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.models import MODELS, SWIN, VIT, Made, build, image_model
from benchmarks.pairs import CONFIGS
from poochplan.tensors.operators import past_first_calls
from poochplan.workload import Workload, load_workload

_TEXT = {"batch_size": 4, "sequence_length": 256, "layers": 6, "width": 256, "heads": 4, "vocabulary": 4096}


@dataclass(frozen=True)
class Network:
    make: Callable[[], Workload]
    blocks: tuple[str, ...]
    """Names of their classes; of those that lie in each other, the outermost count."""


class TinyBlock(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh())


class TinyConvBlock(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


def _tiny(block: Callable[[int], nn.Module], shape: tuple[int, ...]) -> Workload:
    """For tests: six blocks, a step of some milliseconds."""
    model = nn.Sequential(*(block(shape[1]) for _ in range(6)))
    batch = torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Workload(model, lambda: model(batch).square().mean(), optimizer)


def _shipped(name: str, **settings: Any) -> Callable[[], Workload]:
    return lambda: load_workload(str(CONFIGS / f"{name}.toml"), settings).workload


def _adamw(make: Callable[[], Made]) -> Callable[[], Workload]:
    def workload() -> Workload:
        model, step = make()
        return Workload(model, step, torch.optim.AdamW(model.parameters()))

    return workload


NETWORKS: dict[str, Network] = {
    "resnet50": Network(_shipped("resnet50", batch_size=8, image_size=112), ("ResNetBottleNeckLayer",)),
    "gpt2": Network(_shipped("gpt2", **_TEXT), ("GPT2Block",)),
    "unet3d": Network(_shipped("unet3d", side=48, features=[16, 16, 32, 64, 128, 16]), ("TwoConv", "Down", "UpCat")),
    "seq2seq": Network(_shipped("seq2seq"), ("LSTM", "MultiheadAttention")),
    "bert": Network(_shipped("bert", **_TEXT), ("BertLayer",)),
    "vit": Network(_adamw(image_model("vit", 10, 112, **VIT)), ("ViTLayer",)),
    "swin": Network(_adamw(image_model("swin", 16, 112, **SWIN)), ("SwinLayer",)),
}
TINY: dict[str, Network] = {
    "tiny-mlp": Network(lambda: _tiny(TinyBlock, (256, 64)), ("TinyBlock",)),
    "tiny-conv": Network(lambda: _tiny(TinyConvBlock, (8, 8, 32, 32)), ("TinyConvBlock",)),
}


@dataclass(frozen=True)
class Recurrent:
    """A ready workload at one size."""

    config: str
    settings: dict[str, Any]
    epoch_steps: int
    """Of one epoch: as many as the text has chunks; of data without an end, as many as are called one."""
    curve_steps: int
    """Steps of the loss curve."""
    policies: tuple[str, ...]
    large: dict[str, Any] = field(default_factory=dict)
    """What is otherwise where it is simulated: sizes of a GPU."""


_TEXT_OF_EPOCHS = {"batch_size": 50, "sequence_length": 100, "width": 128, "chunks": 0, "unrolled": True}
"""Two layers of 128 and 50 rows of text, as char-rnn has it by itself; its own chunks are of 50 characters."""
_OF_TEXT = ("earliest-first", "latest-first", "swap-all", "ilp")
_LARGE_TEXT = {"batch_size": 256, "sequence_length": 256, "width": 512, "chunks": 2, "text": "large"}

_SMALL = _TEXT_OF_EPOCHS | {"text": "small"}
_STEPS: dict[str, Any] = {"sequence_length": 40, "width": 192}
_LARGE_STEPS = {"batch_size": 128, "sequence_length": 64, "width": 512}
_TINY_STEPS: dict[str, Any] = {"batch_size": 8, "sequence_length": 8, "width": 32}

RECURRENT: dict[str, Recurrent] = {
    "char-rnn-small": Recurrent("char_rnn", _SMALL, 56, 28, _OF_TEXT, _LARGE_TEXT),
    "char-rnn-large": Recurrent("char_rnn", _TEXT_OF_EPOCHS | {"text": "large"}, 879, 28, _OF_TEXT),
    "seq2seq-steps": Recurrent("seq2seq_steps", _STEPS, 10, 10, ("seq2seq", "swap-all", "ilp"), _LARGE_STEPS),
}
TINY_RECURRENT: dict[str, Recurrent] = {
    "tiny-text": Recurrent("char_rnn", _SMALL | _TINY_STEPS | {"chunks": 3}, 3, 4, _OF_TEXT),
    "tiny-steps": Recurrent("seq2seq_steps", _TINY_STEPS, 2, 3, ("seq2seq",)),
}
"""For tests."""
OF_EPOCHS = RECURRENT | TINY_RECURRENT
"""Those of ``benchmarks/char_rnn.py``, which nobody checkpoints by blocks."""
OF_MODELS = {f"models.{name}": Network(functools.partial(build, name), ()) for name in MODELS}
"""Those of ``benchmarks/prediction.py``."""


def fresh(name: str) -> Workload:
    """The network of that name with its step, from the same seed each time."""
    past_first_calls()
    torch.manual_seed(0)
    if name in OF_EPOCHS:
        return _shipped(OF_EPOCHS[name].config, **OF_EPOCHS[name].settings)()
    return (NETWORKS | TINY | OF_MODELS)[name].make()


def blocks_of(name: str, model: nn.Module) -> Iterator[nn.Module]:
    """The network's blocks, outermost ones alone."""
    yield from _outermost(model, (NETWORKS | TINY)[name].blocks)


def _outermost(module: nn.Module, names: tuple[str, ...]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost(child, names)

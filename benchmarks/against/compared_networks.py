"""The networks of ``benchmarks/compare.py``: a step of 0.2 to 0.6 s on two cores, and which modules are their blocks.

Blocks are what a user would hand to ``torch.utils.checkpoint``: layers of transformers, bottlenecks, levels of a U-Net.
Weights are random, modes are those of training with dropout on, and each network is built anew from the same seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.epochs.recurrent_networks import ALL as RECURRENT
from benchmarks.models import CLASSES, MODELS, WIDTH, Made, build, hugging, images
from benchmarks.pairs import CONFIGS
from poochplan.tensors.operators import past_first_calls
from poochplan.workload import Workload, load_workload

_TEXT = {"batch_size": 4, "sequence_length": 256, "layers": 6, "width": 256, "heads": 4, "vocabulary": 4096}


@dataclass(frozen=True)
class Network:
    """A network and its blocks."""

    make: Callable[[], Workload]
    blocks: tuple[str, ...]
    """Names of their classes; of those that lie in each other, the outermost count."""


class TinyBlock(nn.Sequential):
    """A linear layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh())


class TinyConvBlock(nn.Sequential):
    """A convolution with batch norm."""

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


_SWIN: dict[str, Any] = {
    "image_size": 112,
    "patch_size": 4,
    "embed_dim": 48,
    "depths": [2, 2, 4],
    "num_heads": [3, 6, 12],
    "window_size": 7,
    "num_labels": CLASSES,
}
_VIT = WIDTH | {"image_size": 112, "patch_size": 8, "num_labels": CLASSES}

NETWORKS: dict[str, Network] = {
    "resnet50": Network(_shipped("resnet50", batch_size=8, image_size=112), ("ResNetBottleNeckLayer",)),
    "gpt2": Network(_shipped("gpt2", **_TEXT), ("GPT2Block",)),
    "unet3d": Network(_shipped("unet3d", side=48, features=[16, 16, 32, 64, 128, 16]), ("TwoConv", "Down", "UpCat")),
    "seq2seq": Network(_shipped("seq2seq"), ("LSTM", "MultiheadAttention")),
    "bert": Network(_shipped("bert", **_TEXT), ("BertLayer",)),
    "vit": Network(_adamw(hugging("vit", "ImageClassification", images(10, 112), **_VIT)), ("ViTLayer",)),
    "swin": Network(_adamw(hugging("swin", "ImageClassification", images(16, 112), **_SWIN)), ("SwinLayer",)),
}
TINY: dict[str, Network] = {
    "tiny-mlp": Network(lambda: _tiny(TinyBlock, (256, 64)), ("TinyBlock",)),
    "tiny-conv": Network(lambda: _tiny(TinyConvBlock, (8, 8, 32, 32)), ("TinyConvBlock",)),
}

OF_EPOCHS = {name: Network(_shipped(one.config, **one.settings), ()) for name, one in RECURRENT.items()}
"""Those of ``benchmarks/char_rnn.py``, which nobody checkpoints by blocks."""


OF_MODELS = {f"models.{name}": Network(functools.partial(build, name), ()) for name in MODELS}
"""Those of ``benchmarks/prediction.py``."""


def fresh(name: str) -> Workload:
    """The network of that name with its step, from the same seed each time."""
    past_first_calls()
    torch.manual_seed(0)
    return (NETWORKS | TINY | OF_EPOCHS | OF_MODELS)[name].make()


def blocks_of(name: str, model: nn.Module) -> Iterator[nn.Module]:
    """The network's blocks, outermost ones alone."""
    yield from _outermost(model, (NETWORKS | TINY)[name].blocks)


def _outermost(module: nn.Module, names: tuple[str, ...]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost(child, names)

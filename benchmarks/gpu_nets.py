"""The networks of ``gpu_suite.py``: of a library where it is installed, else of ``networks.py`` or this file.

``full`` takes some 10 to 20 GB in-core on a large GPU and 100 to 500 ms a step; ``tiny`` tries the code on a CPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks import networks
from poochplan.workload import Workload
from poochplan.workloads.common import make_optimizer


@dataclass(frozen=True)
class Net:
    """A workload, the modules a user would checkpoint, and where the network is from."""

    workload: Workload
    blocks: list[nn.Module]
    source: str


class Twice(nn.Sequential):
    """Two 3x3x3 convolutions, each with batch norm and a ReLU in place."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__(
            *(nn.Conv3d(width_in, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU(inplace=True)),
            *(nn.Conv3d(width, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU(inplace=True)),
        )


class UNet3d(nn.Module):
    """Ö. Çiçek et al., "3D U-Net", 2016, figure 2, with the channels of ``widths``."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(Twice(a, b) for a, b in zip((1, *widths), widths, strict=False))
        self.lift = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Twice(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            volume = block(volume if level == 0 else nn.functional.max_pool3d(volume, 2))
            skips.append(volume)
        for level in reversed(range(len(self.up))):
            volume = self.up[level](torch.cat((skips[level], self.lift[level](volume)), dim=1))
        logits: torch.Tensor = self.head(volume)
        return logits


class Block(nn.Module):
    """A transformer's block as GPT-2 has it: norms before, attention, a GELU between two linear layers."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(hidden)).chunk(3, dim=-1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        hidden = hidden + self.drop(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        result: torch.Tensor = hidden + self.drop(self.mlp(self.norm2(hidden)))
        return result


class Gpt(nn.Module):
    """GPT-2: learned positions, blocks, a head that shares the embedding's weight."""

    def __init__(self, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.h = nn.ModuleList(Block(width, heads, 0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            hidden = block(hidden)
        return nn.functional.linear(self.norm(hidden), self.words.weight)


def resnet50(where: torch.device, tiny: bool) -> Net:
    batch, side, classes = (2, 32, 10) if tiny else (192, 224, 1000)
    if tiny:
        model, source = networks.ResNet(2, (1, 1, 1, 1), middle=8, expansion=4, groups=1, classes=classes), "own"
    elif importlib.util.find_spec("torchvision") is not None:
        from torchvision.models import resnet50 as theirs

        model, source = theirs(num_classes=classes), "torchvision"
    else:
        model, source = networks.resnet50(classes), "own"
    images, labels = torch.randn(batch, 3, side, side).to(where), torch.randint(classes, (batch,)).to(where)
    model = model.train().to(where)
    blocks = [module for module in model.modules() if type(module).__name__ == "Bottleneck"]
    optimizer = make_optimizer("sgd", model, 0.01)
    workload = Workload(model, lambda: nn.functional.cross_entropy(model(images), labels), optimizer)
    return Net(workload, blocks, source)


def unet3d(where: torch.device, tiny: bool) -> Net:
    batch, side, widths = (1, 16, (4, 8)) if tiny else (4, 128, (32, 64, 128, 256))
    model = UNet3d(widths, classes=4).train().to(where)
    volume = torch.randn(batch, 1, side, side, side).to(where)
    labels = torch.randint(4, (batch, side, side, side)).to(where)
    blocks = [module for module in model.modules() if isinstance(module, Twice)]

    def step() -> torch.Tensor:
        # One-hot and a product: the loss that gathers has no deterministic backward in 3D.
        chances = nn.functional.log_softmax(model(volume), dim=1)
        wanted = nn.functional.one_hot(labels, 4).movedim(-1, 1).to(chances.dtype)
        return -(chances * wanted).sum(1).mean()

    return Net(Workload(model, step, make_optimizer("adamw", model, 1e-3)), blocks, "own")


def gpt2(where: torch.device, tiny: bool) -> Net:
    batch, length, layers, width, heads, words = (16, 16, 2, 32, 2, 64) if tiny else (16, 1024, 12, 768, 12, 50257)
    if not tiny and importlib.util.find_spec("transformers") is not None:
        from poochplan.workloads.text import gpt2 as theirs

        sizes: Any = {"layers": layers, "width": width, "heads": heads, "vocabulary": words}
        workload = theirs(batch_size=batch, sequence_length=length, device=str(where), **sizes)
        return Net(workload, list(workload.model.get_submodule("transformer.h").children()), "transformers")
    model = Gpt(words, length, layers, width, heads).train().to(where)
    tokens = torch.randint(words, (batch, length)).to(where)

    def step() -> torch.Tensor:
        logits = model(tokens)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Net(Workload(model, step, make_optimizer("adamw", model, 3e-4)), list(model.h), "own")


def gpt2_bf16(where: torch.device, tiny: bool) -> Net:
    """GPT-2 under autocast: on a large GPU its ops take less than their launches in float32 would hide."""
    net = gpt2(where, tiny)
    step = net.workload.step

    def cast() -> torch.Tensor:
        with torch.autocast(where.type, torch.bfloat16):
            return step()

    return Net(Workload(net.workload.model, cast, net.workload.optimizer), net.blocks, net.source)


NETS = {"resnet50": resnet50, "gpt2-bf16": gpt2_bf16, "unet3d": unet3d, "gpt2": gpt2}

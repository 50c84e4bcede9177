"""Networks with dropout: autograd saves masks of zeros and one other number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from poochplan.formats.narrow import DRAWING
from poochplan.formats.profile import Profile
from tests.runtime.nets import Case

WIDTH, HEADS, TOKENS, BATCH = 32, 2, 33, 9
"""The number of elements of a mask of the block's results is no multiple of 8 times 64."""


class BertBlock(nn.Module):
    """Attention that is not fused, with dropout of its weights, and a layer behind it; dropout of both results."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(rate)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        parts = self.inputs(hidden).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-2, -1) / math.sqrt(width // HEADS)
        mixed = self.dropout(scores.softmax(-1)) @ parts[2]
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, width)
        hidden = self.norms[0](hidden + self.dropout(self.output(mixed)))
        return self.norms[1](hidden + self.dropout(self.narrow(nn.functional.gelu(self.wide(hidden)))))


class Noise(nn.Module):
    """Masks of users' own making: scaled twice, transposed in memory, and one that is drawn and not scaled."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        twice = torch.empty_like(hidden).bernoulli_(0.75)
        torch.ops.aten.div_.Scalar(twice, 0.75)
        torch.ops.aten.mul_.Scalar(twice, -3)
        turned = torch.empty_like(hidden.transpose(1, 2)).bernoulli_(0.5)
        hidden = hidden * twice + hidden.transpose(1, 2).mul(turned).transpose(1, 2)
        return hidden * torch.empty_like(hidden).bernoulli_(0.9)


def _net(dtype: torch.dtype) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    blocks = *(BertBlock(0.1) for _ in range(2)), Noise(), BertBlock(0.4)
    batch, model = torch.randn(BATCH, TOKENS, WIDTH).to(dtype), nn.Sequential(*blocks).to(dtype)
    return model, lambda model: model(batch).float().square().mean()


class Drawn(Case):
    """A case whose masks have bits in every profile: it takes long to draw them again, however busy the machine is."""

    def new_profile(self, **options: Any) -> Profile:
        profile = super().new_profile(**options)
        ops = (msgspec.structs.replace(op, duration_s=1.0) if op.name == DRAWING else op for op in profile.ops)
        return msgspec.structs.replace(profile, ops=tuple(ops))


def _case(dtype: torch.dtype) -> Case:
    return Drawn(lambda: _net(dtype))


MASKS = {"float32": _case(torch.float32), "bfloat16": _case(torch.bfloat16)}

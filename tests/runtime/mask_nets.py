"""Networks with dropout: autograd saves masks of zeros and one other number, or of bools."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from poochplan.formats.narrow import DRAWING, MAKING
from poochplan.formats.profile import Profile
from tests.runtime.nets import Case

WIDTH, HEADS, TOKENS, BATCH = 32, 2, 33, 9
"""The number of elements of a mask of the block's results is no multiple of 8 times 64."""
BOOL_BATCH = 19
"""So large that bits may stand for masks of bools; the number of elements of an attention's is no multiple of 8."""


class NativeDropout(nn.Module):
    """Dropout as on CUDA, on any device: one op makes the result and a mask of bools."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(hidden, self.rate, True)[0]


class BertBlock(nn.Module):
    """Attention that is not fused, with dropout of its weights, and a layer behind it; dropout of both results."""

    def __init__(self, rate: float, dropout: Callable[[float], nn.Module] = nn.Dropout) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.dropout = dropout(rate)

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


class BoolNoise(nn.Module):
    """Masks of bools of users' own making: transposed in memory, or made by an op of its own."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        turned = torch.empty_like(hidden.transpose(1, 2), dtype=torch.bool).bernoulli_(0.5)
        hidden = hidden + hidden.transpose(1, 2).mul(turned).transpose(1, 2)
        hidden = hidden * torch.bernoulli(torch.empty_like(hidden, dtype=torch.bool), 0.9)
        dropped, mask = torch.native_dropout(hidden, 0.2, True)
        return (dropped * mask).sin()  # a replay of what is saved here runs dropout, and widens its mask


def _net(where: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    blocks = *(BertBlock(0.1) for _ in range(2)), Noise(), BertBlock(0.4)
    return _trained(nn.Sequential(*blocks), torch.randn(BATCH, TOKENS, WIDTH), where, dtype)


def _bools(where: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    dropout = NativeDropout if where.type == "cpu" else nn.Dropout
    blocks = BertBlock(0.1, dropout), BoolNoise(), BertBlock(0.4, dropout)
    return _trained(nn.Sequential(*blocks), torch.randn(BOOL_BATCH, TOKENS, WIDTH), where, dtype)


def _trained(
    model: nn.Module, batch: torch.Tensor, where: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    given = batch.to(dtype).to(where)
    return model.to(dtype).to(where), lambda model: model(given).float().square().mean()


class Drawn(Case):
    """A case whose masks have bits in every profile, however busy the machine is: it takes long to draw them again, or
    to make what dropout reads, and other ops take 0.1 ms.
    """

    def new_profile(self, **options: Any) -> Profile:
        profile = super().new_profile(**options)
        making = {number for number, op in enumerate(profile.ops) if op.name in MAKING}
        slow = {profile.values[one].born for number in making for one in profile.ops[number].inputs}
        slow |= {number for number, op in enumerate(profile.ops) if op.name == DRAWING}
        seconds = dict.fromkeys(slow, 1.0) | dict.fromkeys(making, 1e-2)
        timed = ((op, seconds.get(number, 1e-4)) for number, op in enumerate(profile.ops))
        ops = (msgspec.structs.replace(op, duration_s=duration_s) for op, duration_s in timed)
        return msgspec.structs.replace(profile, ops=tuple(ops))


def masks_on(where: torch.device) -> dict[str, Case]:
    """The cases on a device. On CUDA ordinary dropout makes bools."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    plain = {name: Drawn(partial(_net, where, dtype)) for name, dtype in dtypes.items()}
    return plain | {f"bools, {name}": Drawn(partial(_bools, where, dtype)) for name, dtype in dtypes.items()}


MASKS = masks_on(torch.device("cpu"))
COUNTS = {"float32": 12, "bfloat16": 12, "bools, float32": 9, "bools, bfloat16": 9}
"""The number of masks of each case that are large enough, on the CPU."""

"""Networks whose saved values have narrow forms: masks of dropout, larger copies of tensors that nothing else saves,
indices that a size bounds, and float32 that a cast has made of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from poochplan.formats.forms import BITS, form_of
from poochplan.formats.narrow import DRAWING, MAKING, masks_of
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


Made = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


def _made(model: nn.Module, batch: torch.Tensor, where: torch.device, dtype: torch.dtype = torch.float32) -> Made:
    """The model on the device in that precision, and the mean square of what it gives for the batch."""
    given = batch.to(dtype).to(where)
    return model.to(dtype).to(where), lambda model: model(given).float().square().mean()


def _net(where: torch.device, dtype: torch.dtype) -> Made:
    blocks = *(BertBlock(0.1) for _ in range(2)), Noise(), BertBlock(0.4)
    return _made(nn.Sequential(*blocks), torch.randn(BATCH, TOKENS, WIDTH), where, dtype)


def _bools(where: torch.device, dtype: torch.dtype) -> Made:
    dropout = NativeDropout if where.type == "cpu" else nn.Dropout
    blocks = BertBlock(0.1, dropout), BoolNoise(), BertBlock(0.4, dropout)
    return _made(nn.Sequential(*blocks), torch.randn(BOOL_BATCH, TOKENS, WIDTH), where, dtype)


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


WIDTH = 32


class RootMeanSquare(nn.Module):
    """As in Llama: autograd saves the float32 copy of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)


class LlamaBlock(nn.Module):
    """Two norms, each before a layer whose result is added: every residual dies in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RootMeanSquare() for _ in range(2))
        self.mixing, self.widening = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.narrowing = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.mixing(self.norms[0](hidden))
        return hidden + self.narrowing(nn.functional.silu(self.widening(self.norms[1](hidden))))


class Shared(nn.Module):
    """Keys for two heads of queries each, repeated as a tensor of their own, as in grouped attention."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        queries = self.queries(hidden).view(*hidden.shape[:-1], 2, WIDTH)
        keys = self.keys(hidden).tanh().mul(0.5).unsqueeze(-2).expand(queries.shape).clone()
        return (queries * keys).sum(-2)


class NormedProjection(nn.Module):
    """Under autocast a norm saves a float32 copy of the 16 bits that the linear layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(WIDTH, WIDTH), RootMeanSquare()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.norm(self.project(hidden)).tanh()


def _plain(where: torch.device) -> Made:
    layers = nn.Linear(WIDTH, WIDTH), *(LlamaBlock() for _ in range(3)), Shared(), RootMeanSquare()
    return _made(nn.Sequential(*layers), torch.randn(96, WIDTH), where, torch.bfloat16)


def _autocast(where: torch.device) -> Made:
    batch = torch.randn(96, WIDTH).to(where)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(NormedProjection() for _ in range(4)), Shared())

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast(where.type, torch.bfloat16):
            return model(batch).float().square().mean()

    return model.to(where), loss


def casts_on(where: torch.device) -> dict[str, Case]:
    """The cases on a device."""
    return {"bfloat16": Case(lambda: _plain(where)), "autocast": Case(lambda: _autocast(where))}


CASTS = casts_on(torch.device("cpu"))


class Pools(nn.Module):
    """Planes of more than 65,536 elements, of fewer, and of at most 256; in memory with the channels last, too."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(one, other, 3, padding=1) for one, other in ((1, 2), (2, 4), (4, 32)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.max_pool2d(self.convs[0](images).tanh(), 3, 2, 1)
        hidden = self.convs[1](hidden).contiguous(memory_format=torch.channels_last)
        hidden = nn.functional.max_pool2d(hidden.tanh(), (4, 3), (4, 3), (2, 1), ceil_mode=True)
        hidden = nn.functional.adaptive_max_pool2d(self.convs[2](hidden).sin(), 16)
        return nn.functional.max_pool2d(hidden.sin(), 2, 1, dilation=2)


class Branches(nn.Module):
    """Pools beside each other, so that what they save is most of the step's peak."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.arange(1.0, 7.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pooled = [nn.functional.max_pool2d((images * scale).relu(), 2) for scale in self.scales.unbind()]
        return torch.stack(pooled).sum(0)


class Volumes(nn.Module):
    """Pools of volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv3d(one, other, 3, padding=1) for one, other in ((1, 2), (2, 8), (8, 64)))

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.max_pool3d(self.convs[0](volumes).tanh(), 2)
        hidden = nn.functional.max_pool3d(self.convs[1](hidden).tanh(), 3, 3, 1)
        return nn.functional.adaptive_max_pool3d(self.convs[2](hidden).sin(), (5, 6, 4))


class Choices(nn.Module):
    """Indices along one dimension: of a few elements, of more than 256, and of more than 65,536."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(rows)
        flat = hidden.flatten().sin()[None].expand(1, -1).contiguous()
        least = (hidden + 1).view(64, -1, 64).min(1, keepdim=True)[0]
        greatest = (hidden * 2).max(-1)[0]
        chosen = (hidden - 1).topk(40, dim=0)[0].sum() + flat.topk(4096)[0].sum()
        in_order = (hidden * 3).sort(dim=1, descending=True)[0].cumsum(1)
        steady = (hidden * 4).sort(dim=0, stable=True)[0].cumsum(0)
        picked = hidden.gather(1, hidden.view(-1, 8, 8).argmax(1))
        return torch.cat([one.reshape(-1) for one in (least, greatest, chosen, in_order, steady, picked)])


class Casts(nn.Module):
    """Squares of float32 that is made of bfloat16. Its source is written later, or gone; the last one can be held."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            narrow = layer(rows).to(torch.bfloat16) * 0.5
            squared = narrow.float().square()
            narrow.mul_(2)
            turned = narrow.t().float().square()
            narrow.add_(1)
            rows = (squared + turned.t() + narrow.exp().float()).sin()
        gone = (rows.to(torch.bfloat16) * 3).float().square()
        source = rows.to(torch.bfloat16) * 4
        return gone + source.float().square() + source.sum()


class Formed(Case):
    """A case whose values have narrow forms in every profile, however busy the machine is: nothing else brings them
    back.
    """

    def new_profile(self, **options: Any) -> Profile:
        profile = super().new_profile(**options)
        values = list(profile.values)
        for value in masks_of(profile).values():
            if form_of(profile, value) != BITS:
                values[value] = msgspec.structs.replace(values[value], unreplayable="as for this test")
        return msgspec.structs.replace(profile, values=tuple(values))


def forms_on(where: torch.device) -> dict[str, Case]:
    shapes = {
        Pools: (3, 1, 264, 265),
        Branches: (4, 4, 64, 64),
        Volumes: (3, 1, 50, 41, 36),
        Choices: (2048, 64),
        Casts: (96, 64),
    }
    return {
        build.__name__: Formed(lambda build=build, shape=shape: _made(build(), torch.randn(shape), where))
        for build, shape in shapes.items()
    }


FORMS = forms_on(torch.device("cpu"))
NAMES = {
    "Pools": ["int32", "uint16", "uint16", "uint8"],
    "Branches": ["uint16"] * 6,
    "Volumes": ["int32", "uint16", "uint16"],
    "Choices": ["int32", "uint8", "uint16", "int32", "uint16", "uint16", "int32"],
    "Casts": ["bfloat16"] * 7,
}
"""The forms of the values of each case, in the order of their save points."""

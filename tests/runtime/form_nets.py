"""Networks whose autograd saves indices that a size bounds, and float32 that a cast has made of bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from poochplan.formats.forms import BITS, form_of
from poochplan.formats.narrow import masks_of
from poochplan.formats.profile import Profile
from tests.runtime.nets import Case


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


def _net(
    build: Callable[[], nn.Module], shape: tuple[int, ...], where: torch.device
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    model, batch = build().to(where), torch.randn(shape).to(where)
    return model, lambda model: model(batch).square().mean()


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
    return {build.__name__: Formed(partial(_net, build, shape, where)) for build, shape in shapes.items()}


FORMS = forms_on(torch.device("cpu"))
NAMES = {
    "Pools": ["int32", "uint16", "uint16", "uint8"],
    "Branches": ["uint16"] * 6,
    "Volumes": ["int32", "uint16", "uint16"],
    "Choices": ["int32", "uint8", "uint16", "int32", "uint16", "uint16", "int32"],
    "Casts": ["bfloat16"] * 7,
}
"""The forms of the values of each case, in the order of their save points."""

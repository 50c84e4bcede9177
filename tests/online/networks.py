"""More trainings: networks whose steps are not the same ops each time, or of kinds that the others are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from .trainings import CLASSES, ROWS, WIDTH, Training, blocks, plain, stepping


class Experts(nn.Module):
    """A mixture of experts: each row goes to one of them, so that shapes differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), blocks(4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.before(rows).tanh()
        chances = self.gate(rows).softmax(-1)
        chosen = chances.argmax(-1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(-1)
            mixed = mixed.index_add(0, own, expert(rows[own]) * chances[own, number : number + 1])
        return self.after(mixed)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        series = rows.view(32, ROWS // 32, WIDTH)
        lengths = torch.linspace(ROWS // 64, ROWS // 32, 32).long()
        packed = pack_padded_sequence(series, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.recurrent(packed)[0].data)


def packed_recurrent() -> Training:
    model, rows = Packed(), torch.randn(ROWS, WIDTH)
    return stepping(model, lambda _: model(rows).square().mean())


class AttentionUNet(nn.Module):
    """As diffusion models have it: convolutions down and up with skips, attention at the bottom, a time embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Linear(1, width)
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self._block(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.ModuleList(self._block(2 * width, width) for _ in range(2))
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def _block(width: int, to: int | None = None) -> nn.Module:
        return nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, to or width, 3, padding=1))

    def forward(self, images: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden, skips = self.into(images) + self.time(time)[:, :, None, None], []
        for block in self.down:
            hidden = hidden + block(hidden)
            skips.append(hidden)
            hidden = nn.functional.avg_pool2d(hidden, 2)
        rows = hidden.flatten(2).transpose(1, 2)
        hidden = hidden + self.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).view_as(hidden)
        for block in self.up:
            hidden = block(torch.cat([nn.functional.interpolate(hidden, scale_factor=2.0), skips.pop()], 1))
        return self.out(hidden)


def diffusion() -> Training:
    model, images = AttentionUNet(), torch.randn(4, 3, 32, 32)

    def forward(_: int) -> torch.Tensor:
        noise, time = torch.randn_like(images), torch.rand(4, 1)
        return nn.functional.mse_loss(model(images + time[:, :, None, None] * noise, time), noise)

    return stepping(model, forward)


def segmentation() -> Training:
    """MONAI's U-Net on patches of a volume that lives beside the step."""
    from monai.networks.nets import UNet  # takes seconds

    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16), strides=(2,), num_res_units=1)
    volume = torch.randn(1, 1, 48, 48, 48)

    def forward(number: int) -> torch.Tensor:
        at = 4 * (number % 4)
        patch = volume[..., at : at + 32, at : at + 32, at : at + 32]
        return nn.functional.cross_entropy(model(patch), (patch[:, 0] > 0).long())

    return stepping(model, forward)


NETWORKS: dict[str, Callable[[], Training]] = {
    "mixture_of_experts": lambda: plain(Experts()),
    "packed_recurrent": packed_recurrent,
    "diffusion": diffusion,
    "segmentation": segmentation,
}

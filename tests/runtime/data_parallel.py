"""One of two processes of data-parallel training: ``data_parallel.py RANK FOLDER PLAN``; they meet in FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import poochplan
from tests.runtime.nets import Case, train


class Shared(nn.Module):
    """One block called three times, and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for _ in range(3):
            hidden = hidden + self.block(hidden)
        return self.head(hidden)


def main(rank: int, folder: Path, plan_file: Path) -> None:
    """What three steps on this process's own batch left behind, in-core and planned, goes to ``rankN.pt``."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save([trained(rank, plan) for plan in (None, poochplan.Plan.load(plan_file))], folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def trained(rank: int, plan: poochplan.Plan | None) -> list[list[torch.Tensor]]:
    tokens = torch.randint(0, 20, (4, 12), generator=torch.Generator().manual_seed(10 + rank))

    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model = nn.parallel.DistributedDataParallel(Shared())
        return model, lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def seed(place: str) -> None:
        if place == "before":
            torch.manual_seed(20 + rank)

    seen, report = train(Case(make), 3, plan, seed)
    if report is not None:
        assert report.total.fallbacks == 0, report.total.fallback_reasons
        assert report.total.out_bytes > 0
        assert report.total.replayed_values > 0
    return seen


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

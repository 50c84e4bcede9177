"""One of two processes of data-parallel training: ``data_parallel.py RANK FOLDER PLAN``; they meet in FOLDER."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from torch import nn

import poochplan
from tests.runtime.nets import snapshot


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
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Shared())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 20, (4, 12), generator=torch.Generator().manual_seed(10 + rank))
    seen = []
    torch.manual_seed(20 + rank)
    with contextlib.nullcontext() if plan is None else poochplan.apply(plan, model) as session:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            seen.append(snapshot(model, loss))
            optimizer.step()
    if session is not None:
        total = session.report().total
        assert total.fallbacks == 0, total.fallback_reasons
        assert total.out_bytes > 0
        assert total.replayed_values > 0
    return seen


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

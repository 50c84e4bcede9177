"""Loops under DDP's options on several processes: ``torchrun ... -m tests.online.replicated FOLDER NAME ...``.

Each of the named kinds trains without a session, then with ``auto``. What came of it goes to ``rankN.json`` in FOLDER.
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.allocated_bytes import allocated_bytes
from tests.online.sharded import BATCH, WIDTH, Tied, plain, train, with_auto

KINDS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "accumulating": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
"""Options of the wrapper. Gradients of ``accumulating`` are not reduced behind each first backward (``no_sync``).

After the last two kinds a process is not like new: torch's reducer holds the hooks in which it was called, so these and
the model hold each other, through C++.
"""


class Sparing(Tied):
    """A layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(Sparing() if kind == "unused" else Tied(), **KINDS[kind])


def step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    """One step on this rank's own batches: its losses."""
    losses, micros = [], 2 if kind == "accumulating" else 1
    for micro in range(micros):
        with nullcontext() if micro == micros - 1 else model.no_sync():  # type: ignore[operator]
            tokens = torch.randint(0, 100, (BATCH,))
            loss = nn.functional.cross_entropy(model(tokens), torch.randint(0, 100, (BATCH,)))
            loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def main(folder: Path, kinds: list[str]) -> None:
    meter = allocated_bytes()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found = {}
    for kind in kinds:
        trained = functools.partial(train, functools.partial(build, kind), functools.partial(step, kind), meter)
        found[kind] = {"plain": trained(plain), "planned": trained(with_auto(folder / kind))}
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""Loops under DDP's options on several processes: ``torchrun ... -m tests.online.replicated FOLDER NAME ...``.

Each of the named kinds trains without a session, then with ``auto``. What came of it goes to ``rankN.json`` in FOLDER.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.allocated_bytes import AllocatedBytes, allocated_bytes
from tests.online.sharded import BATCH, PLANNED_AT, STEPS, WIDTH, Tied, facts_of, plain, with_auto

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


def train(kind: str, meter: AllocatedBytes, session_of: Callable[..., Any]) -> dict[str, Any]:
    """What came of it. The peak is that of the last steps, which follow the plan."""
    gc.collect()
    torch.manual_seed(0)
    model = DistributedDataParallel(Sparing() if kind == "unused" else Tied(), **KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, peak_bytes, micros = [], 0, 2 if kind == "accumulating" else 1
    torch.manual_seed(1 + torch.distributed.get_rank())
    with session_of(model, optimizer) as session:
        for number in range(STEPS):
            if session is not None and number == PLANNED_AT:
                session.wait_until_planned()
            meter.restart()
            for micro in range(micros):
                with nullcontext() if micro == micros - 1 else model.no_sync():
                    tokens = torch.randint(0, 100, (BATCH,))
                    loss = nn.functional.cross_entropy(model(tokens), torch.randint(0, 100, (BATCH,)))
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            peak_bytes = max(peak_bytes, meter.peak if number > PLANNED_AT + 1 else 0)
    bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    found = {"losses": losses, "parameters": hashlib.sha256(bits).hexdigest(), "peak_bytes": peak_bytes}
    return found if session is None else found | facts_of(session)


def main(folder: Path, kinds: list[str]) -> None:
    meter = allocated_bytes()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found = {}
    for kind in kinds:
        found[kind] = {
            "plain": train(kind, meter, plain),
            "planned": train(kind, meter, with_auto(folder / kind)),
        }
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

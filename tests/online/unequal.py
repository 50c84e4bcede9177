"""Ranks that are not alike: ``torchrun ... -m tests.online.unequal FOLDER KIND``; results go to ``rankN.json``.

``budgets``: rank 1 has a smaller budget. ``shapes``: rank 1 has a larger batch. ``killed``: rank 1 is killed while
rank 0 has a plan made.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poochplan
from tests.runtime.nets import LINK

STEPS, PLANNED_AT = 20, 13


def trained(rank: int, batch: int, session_of: Any) -> dict[str, Any]:
    """What came of one training, with another batch on each rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks))
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    torch.manual_seed(1 + rank)
    with session_of(model, optimizer) as session:
        for number in range(STEPS):
            if number == PLANNED_AT and session is not None:
                session.wait_until_planned()
            loss = model(torch.randn(batch, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    bits = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
    found: dict[str, Any] = {"losses": losses, "parameters": bits}
    if session is None:
        return found
    plan = session.plan
    return found | {
        "budget_bytes": plan.budget_bytes if plan is not None else 0,
        "in_core_bytes": plan.prediction.in_core_peak_bytes if plan is not None else 0,
        "followed": session.report().steps_followed,
    }


def die_while_planning(files: Path) -> None:
    """Kills this process as soon as another one is asked for a plan."""
    while not list(files.glob("poochplan-*/request.json")):
        time.sleep(0.01)
    (files / "planning").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    batch = 320 if kind == "shapes" and rank == 1 else 256
    budget = "75%" if kind == "budgets" and rank == 1 else "90%"

    def auto(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        limit_s = 60 if kind == "killed" else 1
        options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": limit_s, "before_plan": "swap"}
        return poochplan.auto(model, optimizer, budget=budget, arena="off", cache=folder / "cache", **options)

    if kind == "killed" and rank == 1:
        threading.Thread(target=die_while_planning, args=(Path(os.environ["TMPDIR"]),), daemon=True).start()
    facts = {"plain": trained(rank, batch, lambda *_: nullcontext()), "planned": trained(rank, batch, auto)}
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

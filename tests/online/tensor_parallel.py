"""A loop under tensor parallelism: ``torchrun ... -m tests.online.tensor_parallel FOLDER``; what came of it without a
session, with ``auto`` and with its plan goes to ``rankN.json``.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import poochplan
from tests.allocated_bytes import AllocatedBytes, allocated_bytes
from tests.online.sharded import Block
from tests.runtime.nets import LINK

BATCH, STEPS, PLANNED_AT = 512, 18, 13


def trained(meter: AllocatedBytes, session_of: Any) -> tuple[dict[str, Any], Any]:
    """Losses, parameters and the peak of the last steps, with the same batches on all ranks; and the session."""
    gc.collect()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(64, 10))
    for block in model[:-1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer, losses, peak_bytes = torch.optim.AdamW(model.parameters(), foreach=False), [], 0
    with session_of(model, optimizer) as session:
        for number in range(STEPS):
            if number == PLANNED_AT and session is not None:
                session.wait_until_planned()
            meter.restart()
            loss = nn.functional.cross_entropy(model(torch.randn(BATCH, 64)), torch.randint(10, (BATCH,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            peak_bytes = max(peak_bytes, meter.peak if number > PLANNED_AT + 1 else 0)
    parts = [getattr(one, "_local_tensor", one).detach().contiguous() for one in model.parameters()]
    bits = hashlib.sha256(b"".join(one.numpy().tobytes() for one in parts)).hexdigest()
    return {"losses": losses, "parameters": bits, "peak_bytes": peak_bytes}, session


def main(folder: Path) -> None:
    meter = allocated_bytes()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": 1, "cache": folder / f"cache{rank}"}
    plain, _ = trained(meter, lambda *_: nullcontext())
    planned, session = trained(meter, lambda *both: poochplan.auto(*both, budget="80%", arena="off", **options))
    plan, followed = session.plan, session.report().steps_followed
    del session
    applied, session = trained(meter, lambda model, _: poochplan.apply(plan, model, arena="off"))
    facts = {
        "plain": plain,
        "planned": planned,
        "applied": applied,
        "budget_bytes": plan.budget_bytes,
        "followed": [followed, session.report().steps_followed],
        "moved": plan.prediction.out_bytes,
        "fallbacks": session.total.fallbacks,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

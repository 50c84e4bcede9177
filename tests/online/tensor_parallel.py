"""A loop under tensor parallelism: ``torchrun ... -m tests.online.tensor_parallel FOLDER``; what came of it without a
session, with ``auto``, with its plan, and with plans that swap or recompute all that may be, goes to ``rankN.json``.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import poochplan
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.writing import with_decisions
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import SavedHandle
from tests.allocated_bytes import AllocatedBytes, allocated_bytes
from tests.online.sharded import Block
from tests.runtime.nets import LINK

BATCH, STEPS, PLANNED_AT = 512, 18, 13


DTENSORS: Counter[str] = Counter()
"""What was decided about the values that were saved as DTensors, once for each of their uses."""


def counting_dtensors() -> None:
    """From now on."""
    unpack = Engine._unpack

    def counted(engine: Engine, handle: SavedHandle) -> torch.Tensor:
        tensor = unpack(engine, handle)
        if isinstance(tensor, torch.distributed.tensor.DTensor):
            DTENSORS["untouched" if handle.value is None else handle.value.decision.value] += 1
        return tensor

    Engine._unpack = counted  # type: ignore[method-assign]


def all_that_may_be(session: Any, decision: str) -> Any:
    """A plan of the session's profile that swaps or recomputes them."""
    problem = build_problem(session.profile)
    values = zip(problem.names, problem.must_keep, problem.replay.replays, strict=True)
    names = [name for name, kept, replay in values if not kept and (decision == "swap" or replay is not None)]
    return with_decisions(session.profile, session.plan, dict.fromkeys(names, decision))


def trained(meter: AllocatedBytes, session_of: Any) -> tuple[dict[str, Any], Any]:
    """Losses, parameters and the peak of the last steps, with the same batches on all ranks; and the session."""
    gc.collect()
    DTENSORS.clear()
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
    return {"losses": losses, "parameters": bits, "peak_bytes": peak_bytes, "dtensors": dict(DTENSORS)}, session


def main(folder: Path) -> None:
    meter = allocated_bytes()
    counting_dtensors()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": 1, "cache": folder / f"cache{rank}"}
    plain, _ = trained(meter, lambda *_: nullcontext())
    planned, session = trained(meter, lambda *both: poochplan.auto(*both, budget="80%", arena="off", **options))
    plan, followed = session.plan, [session.report().steps_followed]
    plans = {"applied": plan, **{f"all {one}": all_that_may_be(session, one) for one in ("swap", "recompute")}}
    del session
    facts = {"plain": plain, "planned": planned, "budget_bytes": plan.budget_bytes}
    facts["fallbacks"] = 0
    for name, given in plans.items():
        facts[name], session = trained(meter, lambda model, _, given=given: poochplan.apply(given, model, arena="off"))
        followed.append(session.report().steps_followed)
        facts["fallbacks"] += session.total.fallbacks
        del session
    facts["followed"] = followed
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

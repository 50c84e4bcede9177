"""A loop under tensor parallelism: ``torchrun ... -m tests.online.tensor_parallel FOLDER LAYOUT``; what came of it
without a session, with ``auto``, with its plan, and with plans that swap or recompute all that may be, goes to
``rankN.json``.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import poochplan
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.writing import with_decisions
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import SavedHandle
from tests.allocated_bytes import AllocatedBytes, allocated_bytes
from tests.online.sharded import Block
from tests.runtime.nets import LINK

STEPS, PLANNED_AT = 18, 13


def whole() -> dict[str, ParallelStyle]:
    """Each rank has whole inputs of blocks."""
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def sequence() -> dict[str, ParallelStyle]:
    """Each rank has a part of each sequence, and gathers them behind the norm."""
    parts = Shard(1)
    up, down = ColwiseParallel(input_layouts=parts), RowwiseParallel(output_layouts=parts)
    return {"norm": SequenceParallel(), "up": up, "down": down}


LAYOUTS = {"whole": whole, "sequence": sequence}


DTENSORS: Counter[str] = Counter()
"""What was decided about the values that were saved as DTensors, once for each of their uses."""


def counting_dtensors() -> None:
    """From now on."""
    unpack = Engine._unpack

    def counted(engine: Engine, handle: SavedHandle) -> torch.Tensor:
        tensor = unpack(engine, handle)
        if isinstance(tensor, DTensor):
            DTENSORS["untouched" if handle.value is None else handle.value.decision.value] += 1
        return tensor

    Engine._unpack = counted  # type: ignore[method-assign]


def all_that_may_be(session: Any, decision: str) -> Any:
    """A plan of the session's profile that swaps or recomputes them."""
    problem = build_problem(session.profile)
    values = zip(problem.names, problem.must_keep, problem.replay.replays, strict=True)
    names = [name for name, kept, replay in values if not kept and (decision == "swap" or replay is not None)]
    return with_decisions(session.profile, session.plan, dict.fromkeys(names, decision))


def trained(meter: AllocatedBytes, layout: Callable[[], Any], session_of: Any) -> tuple[dict[str, Any], Any]:
    """Losses, parameters and the peak of the last steps, with the same batches on all ranks; and the session."""
    gc.collect()
    DTENSORS.clear()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    blocks = [parallelize_module(Block(), mesh, layout()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    optimizer, losses, peak_bytes = torch.optim.AdamW(model.parameters(), foreach=False), [], 0
    with session_of(model, optimizer) as session:
        for number in range(STEPS):
            if number == PLANNED_AT and session is not None:
                session.wait_until_planned()
            meter.restart()
            loss = nn.functional.cross_entropy(model(torch.randn(16, 32, 64)).flatten(0, 1), torch.randint(10, (512,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            peak_bytes = max(peak_bytes, meter.peak if number > PLANNED_AT + 1 else 0)
    parts = [getattr(one, "_local_tensor", one).detach().contiguous() for one in model.parameters()]
    bits = hashlib.sha256(b"".join(one.numpy().tobytes() for one in parts)).hexdigest()
    return {"losses": losses, "parameters": bits, "peak_bytes": peak_bytes, "dtensors": dict(DTENSORS)}, session


def main(folder: Path, layout: str) -> None:
    meter = allocated_bytes()
    counting_dtensors()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": 1, "cache": folder / f"cache{rank}"}
    train = functools.partial(trained, meter, LAYOUTS[layout])
    plain, _ = train(lambda *_: nullcontext())
    planned, session = train(lambda *both: poochplan.auto(*both, budget="80%", arena="off", **options))
    plan, followed = session.plan, [session.report().steps_followed]
    plans = {"applied": plan, **{f"all {one}": all_that_may_be(session, one) for one in ("swap", "recompute")}}
    del session
    facts = {"plain": plain, "planned": planned, "budget_bytes": plan.budget_bytes}
    facts["fallbacks"] = 0
    for name, given in plans.items():
        facts[name], session = train(lambda model, _, given=given: poochplan.apply(given, model, arena="off"))
        followed.append(session.report().steps_followed)
        facts["fallbacks"] += session.total.fallbacks
        del session
    facts["followed"] = followed
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

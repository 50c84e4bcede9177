"""A loop under tensor parallelism: ``torchrun ... -m tests.online.tensor_parallel FOLDER LAYOUT``; what came of it
without a session, with ``auto``, with its plan, and with plans that swap or recompute all that may be, goes to
``rankN.json``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
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

from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import SavedHandle
from tests.allocated_bytes import allocated_bytes
from tests.online.sharded import GIVEN_STEPS, Block, all_that_may_be, plain, told, train, with_auto, with_plan


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


def build(layout: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return nn.Sequential(*(parallelize_module(Block(), mesh, layout()) for _ in range(4)), nn.Linear(64, 10))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> list[float]:
    loss = nn.functional.cross_entropy(model(torch.randn(16, 32, 64)).flatten(0, 1), torch.randint(10, (512,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


def main(folder: Path, layout: str) -> None:
    meter = allocated_bytes()
    counting_dtensors()
    with told(folder) as found:

        def trained(session_of: Callable[..., Any], **options: Any) -> Any:
            DTENSORS.clear()
            facts = train(lambda: build(LAYOUTS[layout]), step, meter, session_of, are_alike=True, **options)
            return facts | {"dtensors": dict(DTENSORS)}

        plans: dict[str, Any] = {}

        def plan_others(session: Any) -> None:
            plans["applied"] = session.plan
            plans.update({f"all {one}": all_that_may_be(session, one) for one in ("swap", "recompute")})

        found["planned"] = trained(with_auto(folder / f"cache{torch.distributed.get_rank()}"), look=plan_others)
        found["plain"] = trained(plain, steps=found["planned"]["steps"])
        found |= {name: trained(with_plan(plan), steps=GIVEN_STEPS) for name, plan in plans.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

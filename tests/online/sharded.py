"""Loops under FSDP2 on several processes: ``torchrun ... -m tests.online.sharded FOLDER NAME ...``.

Each of the named kinds trains without a session, then with ``auto``, then with a plan that recomputes all that may be.
What came of it goes to ``rankN.json`` in the FOLDER.
"""

from __future__ import annotations

import functools
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
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.writing import with_decisions
from tests.allocated_bytes import AllocatedBytes, allocated_bytes
from tests.runtime.nets import LINK

WIDTH, BATCH, STEPS, PLANNED_AT = 64, 512, 22, 17
BUDGET = "80%"


class Block(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.GELU()
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=False) if self.checkpoints else self.inside(x)  # type: ignore[no-any-return]

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Tied(nn.Module):
    """Blocks between an embedding and a head that have one weight, or a frozen embedding and a head of its own."""

    def __init__(self, *, frozen: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpoints=checkpoints and number % 2 == 0) for number in range(4))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        if frozen:
            for one in (self.embed.weight, *(block.up.weight for block in self.blocks)):
                one.requires_grad_(requires_grad=False)
        else:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(*, frozen: bool = False, checkpoints: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Tied(frozen=frozen, checkpoints=checkpoints)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    "resharded": build,
    "not_resharded": functools.partial(build, reshard_after_forward=False),
    "resharded_to_2": functools.partial(build, reshard_after_forward=2),
    "accumulating": build,
    "mixed": functools.partial(
        build, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "checkpointing": functools.partial(build, checkpoints=True),
    "frozen": functools.partial(build, frozen=True),
    "loading": build,
    "offloaded": functools.partial(build, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


def step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    """One step on this rank's own batch: its losses."""
    count = 2 if kind == "accumulating" else 1
    for micro in range(count):
        if count > 1:
            model.set_requires_gradient_sync(micro == count - 1)  # type: ignore[operator]
        tokens = torch.randint(0, 100, (BATCH,))
        loss = nn.functional.cross_entropy(model(tokens).float(), torch.randint(0, 100, (BATCH,)))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if kind == "loading" and number % 4 == 3:
        set_model_state_dict(model, {name: one.clone() for name, one in get_model_state_dict(model).items()})
        save(get_model_state_dict(model), checkpoint_id=Path(sys.argv[1]) / "checkpoint")  # by all ranks
    return [loss.item()]


def train(
    build: Callable[[], nn.Module],
    step_of: Callable[[nn.Module, torch.optim.Optimizer, int], list[float]],
    meter: AllocatedBytes,
    session_of: Callable[..., Any],
    file: Path | None = None,
) -> dict[str, Any]:
    """What came of it. The peak is that of the last steps, which follow the plan. Another plan goes to the file."""
    gc.collect()
    model = build()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    losses, peak_bytes = list[float](), 0
    torch.manual_seed(1 + torch.distributed.get_rank())
    with session_of(model, optimizer) as session:
        for number in range(STEPS):
            if session is not None and number == PLANNED_AT:
                session.wait_until_planned()
            meter.restart()
            losses += step_of(model, optimizer, number)
            peak_bytes = max(peak_bytes, meter.peak if number > PLANNED_AT + 1 else 0)
    local = (one.to_local() if isinstance(one, DTensor) else one for one in model.parameters())
    bits = b"".join(one.detach().numpy().tobytes() for one in local)
    found = {"losses": losses, "parameters": hashlib.sha256(bits).hexdigest(), "peak_bytes": peak_bytes}
    if file is not None and torch.distributed.get_rank() == 0:
        write_all_recomputed(session, file)
    return found if session is None else found | facts_of(session)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return nullcontext()


def with_auto(cache: Path) -> Callable[..., Any]:
    options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": 0.5, "arena": "off", "cache": cache}
    return lambda model, optimizer: poochplan.auto(model, optimizer, budget=BUDGET, **options)


def with_plan(file: Path) -> Callable[..., Any]:
    return lambda model, optimizer: poochplan.apply(poochplan.Plan.load(file), model, arena="off")


def write_all_recomputed(session: Any, file: Path) -> None:
    """A plan of the profile that recomputes all that may be."""
    profile = session.profile
    problem = build_problem(profile)
    values = zip(problem.names, problem.must_keep, problem.replay.replays, strict=True)
    names = [name for name, must_keep, replay in values if not must_keep and replay is not None]
    with_decisions(profile, session.plan, dict.fromkeys(names, "recompute")).save(file)


def facts_of(session: Any) -> dict[str, Any]:
    plans = [one.plan for one in session._source.plans.values()]
    return {
        "plans": sorted(hashlib.sha256(repr(plan).encode()).hexdigest() for plan in plans),
        "budget_bytes": max((plan.budget_bytes for plan in plans), default=0),
        "predicted_bytes": max((plan.prediction.peak_bytes for plan in plans), default=0),
        "in_core_bytes": max((plan.prediction.in_core_peak_bytes for plan in plans), default=0),
        "followed": session.report().steps_followed,
        "fallbacks": session.total.fallback_reasons,
        "replayed": session.total.replayed_values,
        "swapped_bytes": session.total.out_bytes,
    }


def main(folder: Path, kinds: list[str]) -> None:
    meter = allocated_bytes()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    found = {}
    for kind in kinds:
        file = None if kind == "accumulating" else folder / f"{kind}.json"  # which has two plans
        trained = functools.partial(train, KINDS[kind], functools.partial(step, kind), meter)
        found[kind] = {"plain": trained(plain), "planned": trained(with_auto(folder / kind), file)}
        torch.distributed.barrier()
        if file is not None:
            found[kind]["recomputed"] = trained(with_plan(file))
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

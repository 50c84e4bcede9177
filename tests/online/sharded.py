"""Loops under FSDP2 or DDP on several processes: ``torchrun ... -m tests.online.sharded FOLDER NAME ...``.

Each of the named kinds trains with ``auto`` and without a session. Those under FSDP2 that have one plan train with
plans that swap and that recompute all that may be, too. What came of it goes to ``rankN.json`` in the FOLDER.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.formats.plan import Plan
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.writing import with_decisions
from tests.allocated_bytes import AllocatedBytes, allocated_bytes
from tests.runtime.nets import LINK

WIDTH, BATCH = 64, 512
GIVEN_STEPS = 6
"""Those that follow a given plan, from the first one on."""
MOST_STEPS, PLANNED_STEPS = 40, 4
"""The most until ``auto`` has a plan, and those afterwards."""


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


SHARDED: dict[str, Callable[[], nn.Module]] = {
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


class Sparing(Tied):
    """A layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


def replicated(model: Callable[[], nn.Module] = Tied, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(model(), **options)


REPLICATED: dict[str, Callable[[], nn.Module]] = {
    "views": functools.partial(replicated, gradient_as_bucket_view=True),
    "accumulating_by_no_sync": replicated,
    "static": functools.partial(replicated, static_graph=True),
    "unused": functools.partial(replicated, Sparing, find_unused_parameters=True),
}
"""After the last two a process is not like new: torch's reducer holds the hooks in which it was called, so these and
the model hold each other, through C++.
"""


def step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    """One step on this rank's own batches: its losses."""
    losses, count = [], 2 if kind.startswith("accumulating") else 1
    for micro in range(count):
        is_last = micro == count - 1
        if kind == "accumulating":
            model.set_requires_gradient_sync(is_last)
        with nullcontext() if is_last or kind == "accumulating" else model.no_sync():
            tokens = torch.randint(0, 100, (BATCH,))
            loss = nn.functional.cross_entropy(model(tokens).float(), torch.randint(0, 100, (BATCH,)))
            loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    if kind == "loading" and number % 4 == 3:
        set_model_state_dict(model, {name: one.clone() for name, one in get_model_state_dict(model).items()})
        save(get_model_state_dict(model), checkpoint_id=Path(sys.argv[1]) / "checkpoint")  # by all ranks
    return losses


def train(
    build: Callable[[], nn.Module],
    step_of: Callable[[nn.Module, torch.optim.Optimizer, int], list[float]],
    meter: AllocatedBytes,
    session_of: Callable[..., Any],
    look: Callable[[Any], object] = lambda session: None,
    *,
    are_alike: bool = False,
    steps: int = 0,
) -> dict[str, Any]:
    """What came of it, bits behind each step. The peak is that of the last steps, which follow the plan. ``look`` is
    given the session when it has ended. Batches are the same on all ranks if ``are_alike``. Without ``steps`` there
    are as many as ``auto`` needs.
    """
    gc.collect()
    model = build()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3, foreach=False)
    losses, digests, peak_bytes = list[float](), list[str](), 0
    last = steps or MOST_STEPS
    torch.manual_seed(1 + torch.distributed.get_rank() * (not are_alike))
    with session_of(model, optimizer) as session:
        while len(digests) < last:
            if not steps and last == MOST_STEPS and is_planned(session):
                last = len(digests) + PLANNED_STEPS
            is_late = len(digests) >= last - (PLANNED_STEPS if steps else PLANNED_STEPS - 2)
            meter.restart()
            losses += step_of(model, optimizer, len(digests))
            peak_bytes = max(peak_bytes, meter.peak if is_late else 0)
            digests.append(digest_of(model))
    found = {"losses": losses, "parameters": digests, "peak_bytes": peak_bytes, "steps": last}
    if session is None:
        return found
    look(session)
    return found | facts_of(session)


def is_planned(session: Any) -> bool:
    """Whether all kinds of segment have a plan on rank 0, which makes them."""
    session.wait_until_planned()
    found = [0 < len(session._source.loop.kinds) <= len(session.plans)]
    torch.distributed.broadcast_object_list(found, 0)
    return found[0]


def digest_of(model: nn.Module) -> str:
    """Of this rank's bits of all parameters."""
    with torch.no_grad():
        local = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
        return hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in local)).hexdigest()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return nullcontext()


def with_auto(cache: Path) -> Callable[..., Any]:
    options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": 0.5, "arena": "off", "cache": cache}
    return lambda model, optimizer: poochplan.auto(model, optimizer, budget="80%", **options)


def with_plan(plan: Plan) -> Callable[..., Any]:
    return lambda model, optimizer: poochplan.apply(plan, model, arena="off", on_audit="off")


def all_that_may_be(session: Any, decision: str) -> Plan:
    """A plan of the session's profile that swaps or recomputes them."""
    problem = Problem.of(session.profile)
    values = zip(problem.names, problem.must_keep, problem.replay.replays, strict=True)
    names = [name for name, kept, replay in values if not kept and (decision == "swap" or replay is not None)]
    return with_decisions(session.profile, session.plan, dict.fromkeys(names, decision))


def facts_of(session: Any) -> dict[str, Any]:
    plans, loop = list(session.plans.values()), getattr(session._source, "loop", None)
    return {
        "plans": sorted(hashlib.sha256(repr(plan).encode()).hexdigest() for plan in plans),
        "budget_bytes": max((plan.budget_bytes for plan in plans), default=0),
        "predicted_bytes": max((plan.prediction.peak_bytes for plan in plans), default=0),
        "in_core_bytes": max((plan.prediction.in_core_peak_bytes for plan in plans), default=0),
        "followed": session.report().steps_followed,
        "refused": [kind.refused for kind in loop.kinds.values()] if loop is not None else [],
        "fallbacks": session.total.fallback_reasons,
        "replayed": session.total.replayed_values,
        "swapped_bytes": session.total.out_bytes,
    }


@contextmanager
def told(folder: Path) -> Iterator[dict[str, Any]]:
    """A block in which the processes are one group. What is put in its dictionary goes to ``rankN.json``."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found: dict[str, Any] = {}
    yield found
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main(folder: Path, kinds: list[str]) -> None:
    meter = allocated_bytes()
    with told(folder) as found:
        for kind in kinds:
            trained = functools.partial(train, (SHARDED | REPLICATED)[kind], functools.partial(step, kind), meter)
            has_one_plan = kind in SHARDED and kind != "accumulating"
            files = {decision: folder / f"{kind}-{decision}.json" for decision in ("swap", "recompute") if has_one_plan}

            def write(session: Any, files: dict[str, Path] = files) -> None:
                for decision, file in files.items() if torch.distributed.get_rank() == 0 else ():
                    all_that_may_be(session, decision).save(file)

            first = {} if kind in SHARDED else {"plain": trained(plain, steps=MOST_STEPS)}
            planned = trained(with_auto(folder / kind), write)
            found[kind] = {"planned": planned} | (first or {"plain": trained(plain, steps=planned["steps"])})
            for decision, file in files.items():
                found[kind][f"all_{decision}"] = trained(with_plan(Plan.load(file)), steps=GIVEN_STEPS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""Ranks that are not alike: ``torchrun ... -m tests.online.unequal FOLDER KIND ...``; results go to ``rankN.json``.

``budgets``: rank 1 has a smaller budget. ``shapes``: rank 1 has a larger batch; ``later``: once there is a plan.
``joined``: rank 1 has fewer batches. ``apart``: rank 1 alone has a session, and each its own group.
``applied``: the plan of two alike ranks, ``plan.json``, is given to ranks that differ. ``wrapped``: it is given to
ranks whose models are wrapped before anything counts; ``idle``: and of which one has no batch. ``killed``: rank 1 is
killed while rank 0 has a plan made. ``failing-0-share``: on rank 0 a function of ours raises once.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import poochplan
from poochplan.errors import PoochError
from tests.online.sharded import digest_of, plain
from tests.online.sharded import told as group
from tests.runtime.injecting import Place, Watch, run
from tests.runtime.nets import LINK

STEPS, PLANNED_AT = 20, 13
BATCH, LARGER = 256, 320
FAILING = {
    "share": ("online/ranks.py", "Ranks.share", 2),
    "due": ("online/ranks.py", "Ranks.are_due", 4),
    "smallest": ("online/known_plans.py", "KnownPlans.take_smallest", 1),
    "study": ("profiler/capture/capture.py", "Capture.__torch_dispatch__", 50),
    "activate": ("online/known_plans.py", "KnownPlans.activate", 1),
    "follow": ("runtime/step_policies/follow.py", "Follow.planned_at_save", 3),
}
"""Which call of which function raises."""


def trained(
    rank: int, session_of: Any, batch_at: Callable[[int], int] = lambda _: BATCH, fewer: int = 0, group: Any = None
) -> dict[str, Any]:
    """What came of one training, with another batch on each rank. Rank 1 may take fewer steps (``Join``)."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks), process_group=group)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    torch.manual_seed(1 + rank)
    with session_of(model, optimizer) as session, Join([model], enable=fewer > 0):
        for number in range(STEPS - rank * fewer):
            if number >= PLANNED_AT and session is not None and (fewer or number == PLANNED_AT):
                session.wait_until_planned()
            loss = model(torch.randn(batch_at(number), 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    found: dict[str, Any] = {"losses": losses, "parameters": digest_of(model)}
    if session is None:
        return found
    plan = session.plan
    return found | {
        "budget_bytes": plan.budget_bytes if plan is not None else 0,
        "in_core_bytes": plan.prediction.in_core_peak_bytes if plan is not None else 0,
        "ranks": plan.link.ranks if plan is not None else 0,
        "followed": session.report().steps_followed,
        "plan": plan,
    }


@functools.cache
def trained_plainly(rank: int) -> dict[str, Any]:
    return trained(rank, plain)


def told(train: Callable[[], dict[str, Any]]) -> list[str]:
    """What the training warned of, and its error."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            train()
        except PoochError as error:
            return [f"{type(error).__name__}: {error}"]
    return [str(one.message) for one in warned if "poochplan" in str(one.message)]


def applied(rank: int, plan: poochplan.Plan) -> dict[str, list[str]]:
    """What is told if rank 1 has larger batches, and its step must not diverge or may; if it has another plan; and if
    the ranks are alike.
    """

    def under(policy: Any, here: poochplan.Plan, batch: int) -> list[str]:
        def apply(model: nn.Module, _: object) -> Any:
            return poochplan.apply(here, model, arena="off", on_divergence=policy)

        return told(lambda: trained(rank, apply, lambda _: batch))

    larger, other = LARGER if rank else BATCH, msgspec.structs.replace(plan, budget_bytes=plan.budget_bytes + rank)
    return {
        "alike": under("error", plan, BATCH),
        "warn": under("warn", plan, larger),
        "error": under("error", plan, larger),
        "plans": under("warn", other, BATCH),
    }


def failing(wanted: dict[str, Any], train: Callable[[], dict[str, Any]], place: Place, is_here: bool) -> dict[str, Any]:
    """Whether a training in which a function of ours may raise is as one without a session, and what is told."""

    def loop(watch: Watch) -> list[bytes]:
        watch.phase = "training"
        found = train()
        return [repr((found["losses"], found["parameters"])).encode()]

    found, _ = run(loop, place if is_here else None)
    is_same = found.bits == [repr((wanted["losses"], wanted["parameters"])).encode()]
    return {"is_same": is_same, "error": found.error, "said": found.said, "reached": found.was_reached}


def die_while_planning(files: Path) -> None:
    """Kills this process as soon as another one is asked for a plan."""
    while not list(files.glob("poochplan-*/request.json")):
        time.sleep(0.01)
    (files / "planning").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def threads() -> dict[str, str]:
    """Names by number."""
    return {one.name: (one / "comm").read_text() for one in Path("/proc/self/task").iterdir()}


def main(folder: Path, kinds: list[str]) -> None:
    with group(folder) as facts:
        for kind in kinds:
            gc.collect()  # the models of the kind before, which lie in cycles
            facts[kind] = facts_of(folder, kind, torch.distributed.get_rank())
            torch.distributed.barrier()


def facts_of(folder: Path, kind: str, rank: int) -> dict[str, Any]:
    def batch_at(number: int) -> int:
        is_larger = rank == 1 and (kind == "shapes" or (kind == "later" and number > PLANNED_AT + 2))
        return LARGER if is_larger else BATCH

    group = [torch.distributed.new_group([one]) for one in range(2)][rank] if kind == "apart" else None
    others = threads()
    budget = "75%" if kind == "budgets" and rank == 1 else "90%"

    def auto(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        limit_s = 60 if kind == "killed" else 1
        options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": limit_s, "before_plan": "swap"}
        return poochplan.auto(model, optimizer, budget=budget, arena="off", cache=folder / kind, **options)

    if kind.startswith("failing"):
        _, where, name = kind.split("-")
        file, function, call = FAILING[name]
        place = Place(file, function, "training", call)
        return failing(trained_plainly(rank), partial(trained, rank, auto), place, int(where) == rank)
    if kind == "killed" and rank == 1:
        threading.Thread(target=die_while_planning, args=(Path(os.environ["TMPDIR"]),), daemon=True).start()
    if kind == "shapes":
        facts = {"told": told(lambda: trained(rank, auto, batch_at))}
    elif kind == "applied":
        plan = trained(rank, auto)["plan"]
        facts = applied(rank, plan)
        if rank == 0:
            plan.save(folder / "plan.json")
    elif kind == "wrapped":
        plan = poochplan.Plan.load(folder / "plan.json")
        facts = {"told": told(lambda: trained(rank, lambda model, _: poochplan.apply(plan, model, meter="always")))}
    elif kind == "idle":
        plan = poochplan.Plan.load(folder / "plan.json")
        apply = partial(poochplan.apply, plan, meter="never")
        facts = {"told": told(lambda: trained(rank, lambda model, _: apply(model=model), fewer=STEPS))}
    else:
        fewer = STEPS // 2 if kind == "joined" else 0
        ways = plain, plain if kind == "apart" and rank == 0 else auto
        found, planned = (trained(rank, way, batch_at, fewer, group) for way in ways)
        planned.pop("plan", None)
        facts = {"plain": found, "planned": planned}
    left = [name for number, name in threads().items() if number not in others and "gloo" in name]
    assert not left, "threads of a session's group may free a tensor while the interpreter exits, which aborts"
    return facts


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

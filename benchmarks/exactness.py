"""Gradients bitwise equal, the peak within budget, by an outside meter: every ready workload at three budgets.

Each workload is profiled once and planned at 80%, 60% and the smallest budget there is, without an arena and with one.
Every run is a process of its own under the allocator hook of the tests (``benchmarks/hooked.py``). Loss, gradients,
buffers, parameters and the generator are compared after each step. With ``--meter live`` the meter is
``tests/live_bytes.py``, without an arena, and peaks have to be as predicted as well.

``--small`` takes the small sizes of the tests, a profile without memory with a roofline's durations, and plans that
count simulations: then every column repeats exactly, and two versions of the code can be compared. Such a profile
promises live bytes, so it goes with ``--meter live``.

    python -m benchmarks.exactness [--workloads gpt2,bert] [--meter live [--small]] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch

import poochplan
from benchmarks.facts import MIB, Row, parser_of, table_row, taken, yes
from benchmarks.hooked import Trained, digests_apart, ready_to_fork, train
from benchmarks.pairs import load, profiled
from benchmarks.plans import decisions_of
from benchmarks.processes import in_a_process
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.runtime.metering.step_meter import When
from poochplan.workload import Workload
from tests.live_bytes import LiveBytes  # a meter of the tests, on purpose none of the package
from tests.workloads.small import SMALL

WORKLOADS = ("resnet50", "gpt2", "bert", "unet3d", "seq2seq", "char_rnn")
BUDGETS = ("80%", "60%", "smallest")
STEPS = {"off": 3, "on": 6}
"""With an arena two are metered by their ops, and one to three are learned from."""
EVALUATIONS = 200
Arena = Literal["off", "on"]


def fresh(name: str, *, small: bool) -> Workload:
    """The workload, built anew from the same seed."""
    return load(name, SMALL[name] if small else {})


def profile_of(name: str, asked: argparse.Namespace) -> Profile:
    """The profile; of a small one no clock has a part in it."""
    how: Row = {"iterations": 2, "throttle": asked.throttle}
    how = {"mode": "fake", "roofline": "v100"} if asked.small else how
    return profiled(fresh(name, small=asked.small), name, **how)


def make(name: str, asked: argparse.Namespace, folder: Path) -> list[Row]:
    """Profiles and plans; a row for each plan, which lies in the folder by its number."""
    profile = profile_of(name, asked)
    arenas: tuple[Arena, ...] = ("off",) if asked.meter == "live" else ("off", "on")
    effort: Row = {"evaluations": EVALUATIONS} if asked.small else {"time_limit_s": asked.plan_s}
    rows: list[Row] = []
    for arena in arenas:
        smallest = poochplan.smallest_budget(profile, arena=arena)
        for label in BUDGETS:
            row: Row = {"workload": name, "budget": label, "arena": arena, "memory": str(profile.memory)}
            try:
                plan = poochplan.plan(profile, smallest if label == "smallest" else label, arena=arena, **effort)
            except InfeasibleError as error:
                row["refused_smallest_bytes"] = error.smallest_budget_bytes
            else:
                plan.save(folder / f"{len(rows)}.json", force=True)
                row |= _promises(plan)
                row["share"] = plan.budget_bytes / profile.in_core_peak_bytes
                row["in_core_predicted"] = profile.in_core_peak_bytes
            rows.append(row)
    return rows


def _promises(plan: Plan) -> Row:
    promised = plan.prediction
    return {
        "budget_bytes": plan.budget_bytes,
        "decisions": decisions_of(plan),
        "predicted_first": promised.first_step_peak_bytes,
        "predicted_peak_bytes": promised.peak_bytes,
        "predicted_arena_bytes": promised.arena_bytes,
        "predicted_arena_peak_bytes": promised.arena_peak_bytes,
        "predicted_overhead": promised.overhead,
    }


def run(name: str, arena: Arena, plan_file: Path | None, asked: argparse.Namespace) -> Trained:
    """Some steps, in-core where there is no plan."""
    workload = fresh(name, small=asked.small)
    assert workload.optimizer is not None
    torch.manual_seed(1)
    given = workload.model, workload.step, workload.optimizer
    steps = STEPS[arena] if plan_file or asked.meter == "live" else max(STEPS.values())
    if plan_file is None:
        return live_bytes_of(workload, steps) if asked.meter == "live" else train(*given, steps)
    meter: When = "never" if asked.meter == "live" else "first-steps"
    plan = Plan.load(plan_file)
    with poochplan.apply(plan, workload.model, arena=arena, meter=meter, force=asked.small) as session:
        if asked.meter == "allocated":
            return train(*given, steps, session)
        found = live_bytes_of(workload, steps)
    found.fallbacks = session.report().total.fallbacks
    return found


def live_bytes_of(workload: Workload, steps: int) -> Trained:
    """So many steps under the other meter, which sees tensors alone."""
    found, optimizer = Trained(), workload.optimizer
    assert optimizer is not None
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        inner = [one for entries in optimizer.state.values() for one in entries.values() if torch.is_tensor(one)]
        with LiveBytes(*workload.model.parameters(), *workload.model.buffers(), *inner) as meter:
            loss = workload.step()
            loss.backward()
            optimizer.step()
        found.parts.append(digests_apart(workload.model, loss))
        found.note(meter.peak, None)
    return found


def rows_of(name: str, asked: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        rows: list[Row] = in_a_process(make, name, asked, Path(scratch))
        reference: Trained = in_a_process(run, name, "off", None, asked)
        for number, row in enumerate(rows):
            if "refused_smallest_bytes" in row:
                continue
            planned: Trained = in_a_process(run, name, row["arena"], Path(scratch) / f"{number}.json", asked)
            expected = reference.digests[: len(planned.digests)]
            row |= planned.facts() | {"in_core_peak_bytes": max(reference.peaks)}
            row |= {"bitwise": planned.digests == expected, "within_budget": max(planned.peaks) <= row["budget_bytes"]}
            if asked.meter == "live":
                row["predicted_well"] = predicted_well(row)
    return rows


def predicted_well(row: Row) -> bool:
    """Whether each step's peak is within 1% + 1 MiB of its prediction."""
    predicted = [row["predicted_first"], *[row["predicted_peak_bytes"]] * (len(row["peaks"]) - 1)]
    return all(abs(peak - least) <= 0.01 * peak + MIB for peak, least in zip(row["peaks"], predicted, strict=True))


def passed(row: Row) -> bool:
    """Whether a row is as promised; an arena that was not used is not."""
    if "refused_smallest_bytes" in row:
        return True
    served = row["arena"] == "off" or (row["arena_bytes"] > 0 and not row["large_once_learned"])
    if "predicted_well" in row:
        return bool(row["bitwise"] and row["within_budget"] and row["predicted_well"])
    return bool(row["bitwise"] and row["within_budget"] and served and not row["fallbacks"])


def line(row: Row) -> str:
    if "refused_smallest_bytes" in row:
        return table_row(row["workload"], row["arena"], f"{row['budget']}: refused, {row['refused_smallest_bytes']}")
    with_arena = row["arena"] == "on"
    predicted = row["predicted_arena_peak_bytes" if with_arena else "predicted_peak_bytes"]
    arena = [f"{row['arena_bytes'] / MIB:.1f}", f"{row['served_bytes'] / MIB:.0f}", row["large_once_learned"]]
    return table_row(
        row["workload"],
        row["arena"],
        f"{row['budget']} ({row['share']:.1%})",
        "/".join(map(str, row["decisions"].values())),
        *(f"{row[name] / MIB:.1f}" for name in ("in_core_peak_bytes", "budget_bytes")),
        f"{predicted / MIB:.1f} / {max(row['peaks']) / MIB:.1f}",
        *(arena if with_arena else ["-"] * 3),
        *(yes(row["bitwise"]), yes(row["within_budget"]), row["fallbacks"]),
    )


def main() -> int:
    parser = parser_of(
        __doc__,
        workloads=",".join(WORKLOADS),
        throttle="400MB/s",
        plan_s=3.0,
        small=(False, "the tests' sizes, and nothing that a clock decides"),
    )
    parser.add_argument("--meter", default="allocated", choices=("allocated", "live"))
    asked = parser.parse_args()
    if asked.small and asked.meter == "allocated":
        parser.error("--small: expected --meter live beside it; a profile without memory promises live bytes")
    ready_to_fork()
    rows = taken(asked, asked.workloads.split(","), lambda name: rows_of(name, asked), line)
    good = sum(map(passed, rows))
    print(f"{good} of {len(rows)} as promised")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

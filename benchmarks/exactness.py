"""Gradients bitwise equal, the peak within budget, by an outside meter: every ready workload at three budgets.

Each workload is profiled once and planned at 80%, 60% and the smallest budget there is. Every run is a process of its
own, forked from one that has installed the allocator hook of the tests and done nothing else; see
``benchmarks/hooked.py``. Loss, gradients, buffers, parameters and the generator are compared after each step.

The hook sees all that torch has of the C library: parameters, inputs, what ops take and give back inside, and what the
session takes for itself. Plans are made without an arena (the budget is on allocated bytes) and with one (on the arena,
which counts whole from the first step that it serves, and what lies outside it). With ``--meter live`` the meter is
``tests/live_bytes.py``, without an arena, and peaks have to be as predicted as well. Neither shares code with the
package.

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
from typing import Any, Literal

import torch

import poochplan
from benchmarks.facts import facts_of_run, write_results
from benchmarks.hooked import Trained, digest, ready_to_fork, train
from benchmarks.resident import in_a_process
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.runtime.metering.step_meter import When
from poochplan.workload import Workload, load_workload
from tests.live_bytes import LiveBytes  # a meter of the tests, on purpose none of the package
from tests.workloads.small import SMALL

CONFIGS = Path(__file__).parent.parent / "configs"
WORKLOADS = ("resnet50", "gpt2", "bert", "unet3d", "seq2seq", "char_rnn")
BUDGETS = ("80%", "60%", "smallest")
STEPS = {"off": 3, "on": 6}
"""With an arena two are metered by their ops, and one to three are learned from."""
EVALUATIONS = 200
_MIB = 1 << 20
Arena = Literal["off", "on"]


def fresh(name: str, *, small: bool) -> Workload:
    """The workload, built anew from the same seed."""
    torch.manual_seed(0)
    return load_workload(str(CONFIGS / f"{name}.toml"), SMALL[name] if small else {}).workload


def profile_of(name: str, asked: argparse.Namespace) -> Profile:
    """The profile; of a small one no clock has a part in it."""
    workload = fresh(name, small=asked.small)
    how: dict[str, Any] = {"iterations": 2, "throttle": asked.throttle}
    how = {"mode": "fake", "roofline": "v100"} if asked.small else how
    model, optimizer = workload.model, workload.optimizer
    return poochplan.profile(workload.step, model=model, optimizer=optimizer, workload=name, **how)


def make(name: str, asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Profiles and plans; a row for each plan, which lies in the folder by its number."""
    profile = profile_of(name, asked)
    arenas: tuple[Arena, ...] = ("off",) if asked.meter == "live" else ("off", "on")
    effort: dict[str, Any] = {"evaluations": EVALUATIONS} if asked.small else {"time_limit_s": asked.plan_s}
    rows: list[dict[str, Any]] = []
    for arena in arenas:
        smallest = poochplan.smallest_budget(profile, arena=arena)
        for label in BUDGETS:
            row: dict[str, Any] = {"workload": name, "budget": label, "arena": arena, "memory": str(profile.memory)}
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


def _promises(plan: Plan) -> dict[str, Any]:
    decisions = [str(value.decision) for value in plan.values]
    return {
        "budget_bytes": plan.budget_bytes,
        "decisions": {kind: decisions.count(kind) for kind in ("keep", "swap", "recompute")},
        "predicted_first": plan.prediction.first_step_peak_bytes,
        "predicted_peak_bytes": plan.prediction.peak_bytes,
        "predicted_arena_bytes": plan.prediction.arena_bytes,
        "predicted_arena_peak_bytes": plan.prediction.arena_peak_bytes,
        "predicted_overhead": plan.prediction.overhead,
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
        found.digests.append(digest(workload.model, loss))
        found.note(meter.peak, None)
    return found


def rows_of(name: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one workload."""
    with tempfile.TemporaryDirectory() as scratch:
        rows: list[dict[str, Any]] = in_a_process(make, name, asked, Path(scratch))
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
            print(table_row(row), flush=True)
    return rows


def predicted_well(row: dict[str, Any]) -> bool:
    """Whether each step's peak is within 1% + 1 MiB of its prediction."""
    predicted = [row["predicted_first"], *[row["predicted_peak_bytes"]] * (len(row["peaks"]) - 1)]
    return all(abs(peak - least) <= 0.01 * peak + _MIB for peak, least in zip(row["peaks"], predicted, strict=True))


def passed(row: dict[str, Any]) -> bool:
    """Whether a row is as promised; an arena that was not used is not."""
    if "refused_smallest_bytes" in row:
        return True
    served = row["arena"] == "off" or (row["arena_bytes"] > 0 and not row["large_once_learned"])
    if "predicted_well" in row:
        return bool(row["bitwise"] and row["within_budget"] and row["predicted_well"])
    return bool(row["bitwise"] and row["within_budget"] and served and not row["fallbacks"])


def table_row(row: dict[str, Any]) -> str:
    """One line of the Markdown table in README.md."""
    if "refused_smallest_bytes" in row:
        return f"| {row['workload']} | {row['arena']} | {row['budget']}: refused, {row['refused_smallest_bytes']} |"
    with_arena = row["arena"] == "on"
    predicted = row["predicted_arena_peak_bytes" if with_arena else "predicted_peak_bytes"]
    told = (
        f"{row['arena_bytes'] / _MIB:.1f} | {row['served_bytes'] / _MIB:.0f} | {row['large_once_learned']}"
        if with_arena
        else "- | - | -"
    )
    return (
        f"| {row['workload']} | {row['arena']} | {row['budget']} ({row['share']:.1%}) "
        f"| {'/'.join(map(str, row['decisions'].values()))} | {row['in_core_peak_bytes'] / _MIB:.1f} "
        f"| {row['budget_bytes'] / _MIB:.1f} | {predicted / _MIB:.1f} / {max(row['peaks']) / _MIB:.1f} "
        f"| {told} | {'yes' if row['bitwise'] else 'NO'} | {'yes' if row['within_budget'] else 'NO'} "
        f"| {row['fallbacks']} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--meter", default="allocated", choices=("allocated", "live"))
    parser.add_argument("--throttle", default="400MB/s", help="hold copies to this rate")
    parser.add_argument("--plan-s", type=float, default=3.0, help="seconds for each plan")
    parser.add_argument("--small", action="store_true", help="the tests' sizes, and nothing that a clock decides")
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    arguments = parser.parse_args()
    if arguments.small and arguments.meter == "allocated":
        parser.error("--small: expected --meter live beside it; a profile without memory promises live bytes")
    ready_to_fork()
    rows: list[dict[str, Any]] = []
    facts = facts_of_run(arguments)  # of the code that is loaded now
    for name in arguments.workloads.split(","):
        rows += rows_of(name, arguments)
        write_results(arguments.output, facts | {"rows": rows})
    good = sum(map(passed, rows))
    print(f"{good} of {len(rows)} as promised")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

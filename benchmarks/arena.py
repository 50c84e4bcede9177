r"""Steps and forward passes served from one arena: seconds, page faults, memory and bits, against the same as they are.

Every run is a process of its own. The modes of a workload take turns; a ratio is that of the medians of two neighbours.

``steps``, whose modes are:

* plain:  the step in PyTorch, the C library's allocator as it is
* off:    under the plan, memory given back as it is freed (``apply(arena="off")``)
* huge:   the same with huge pages (``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``)
* on:     under the plan, from its arena
* keep:   everything kept, from an arena
* bytes:  as on, not timed: what torch has of the C library, by the tests' own hook, and the arena on top of it

``passes``: forward passes in eval without gradients, plain and within ``poochplan.arena(model)``; bytes against what
separate blocks and the caching allocator's model would take.

``room``: how much larger than planned an arena comes out that the runtime lays out from a real step, and whether it is
used. Each workload is profiled once and planned at some budgets (``--kept``: of what decisions can move), and takes six
steps under each plan. *Quick* is what a plan's own looks give for the blocks of the step that was learned from.

    python -m benchmarks.arena [--workloads gpt2,unet3d] [--pairs 3] [--steps 10] -o benchmarks/results/arena.json
    python -m benchmarks.arena passes [--pairs 3] [--steps 10] -o benchmarks/results/inference.json
    python -m benchmarks.arena room [--kept 0.3 0.6 0.9] -o benchmarks/results/arena-room.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

import poochplan
from benchmarks.facts import MIB, Row, parser_of, table_head, table_row, taken, yes
from benchmarks.measured_steps import MeasuredSteps, arena_bytes
from benchmarks.pairs import load, one_step, profiled
from benchmarks.plans import budget_of, predicted
from benchmarks.processes import answer_of
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.arena.packing import LOOKS_PER_BLOCK, Block, pack, packed
from poochplan.profiler.pass_profiling import profile_pass
from poochplan.sessions import PLANNER
from poochplan.workload import Workload
from tests.allocated_bytes import allocated_bytes

WORKLOADS: dict[str, dict[str, str]] = {
    "gpt2": {},
    "bert": {},
    "resnet50": {"batch_size": "8"},
    "unet3d": {},
    "seq2seq": {},
    "char_rnn": {},
    "small-unet": {},
}
TIMED = ("plain", "off", "huge", "on", "keep")
COMPARED = (("on", "off"), ("on", "huge"), ("keep", "plain"), ("on", "plain"), ("off", "plain"))
PASSES = ("plain", "arena")
FIGURES = (
    *("calls", "live_peak_bytes", "allocated_peak_bytes", "total_bytes", "separate_bytes", "arena_bytes"),
    *("arena_live_bytes", "outside_bytes", "caching_bytes"),
)
LEARNED_STEPS = 6
"""Two are metered by their ops, one is learned from."""
KEPT = 0.6
"""Of what decisions can move: the budget is the smallest possible one and so much of the way to the in-core peak."""


def fresh(name: str) -> Workload:
    """The workload, built anew from the same seed."""
    if name != "small-unet":
        return load(name, WORKLOADS[name])
    torch.manual_seed(0)
    return small_unet()


def small_unet() -> Workload:
    """A network whose convolutions take more inside than all that is live."""
    from monai.networks.nets.unet import UNet

    model = UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1)
    batch = torch.randn(1, 1, 64, 64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, lambda: model(batch).square().mean(), optimizer)


def make(name: str, folder: Path) -> Row:
    """Profiles and plans; the plans go to the folder."""
    profile = profiled(fresh(name), name, iterations=3)
    plan = poochplan.plan(profile, budget_of(profile, KEPT), time_limit_s=20)
    plan.save(folder / "on.json", force=True)
    poochplan.plan(profile, "100%").save(folder / "keep.json", force=True)
    promised = predicted(plan, "arena_bytes", "arena_live_bytes", "arena_peak_bytes")
    return promised | {
        "memory": profile.memory,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "in_core_live_peak_bytes": profile.in_core_live_peak_bytes,
        "smallest_budget_bytes": poochplan.smallest_budget(profile),
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.prediction.peak_bytes,
        "predicted_overhead": plan.prediction.overhead,
    }


def run(name: str, mode: str, folder: Path, steps: int) -> Row:
    """Some steps in one mode, from the same start."""
    meter = allocated_bytes() if mode == "bytes" else None
    workload = fresh(name)
    torch.manual_seed(1)
    seen = MeasuredSteps(workload, meter)
    if mode == "plain":
        seen.go(steps)
        return seen.found()
    plan = Plan.load(folder / ("keep.json" if mode == "keep" else "on.json"))
    with poochplan.apply(plan, workload.model, arena="off" if mode in ("off", "huge") else "on") as session:
        seen.arena_bytes = lambda: arena_bytes(session)
        seen.go(steps)
        report = session.report()
    found = seen.found() | {"fallbacks": report.total.fallbacks, "metered_peak_bytes": report.last_step.peak_bytes}
    if (served := report.arena) is not None:
        names = ("larger_bytes", "served", "served_bytes", "unplanned_bytes", "taken_bytes")
        found |= {"arena_bytes": served.size_bytes} | {name: getattr(served, name) for name in names}
        found["not_served"] = [[one.size_bytes, one.layer, one.why] for one in served.unserved]
    return found


def in_modes(modes: Sequence[str], pairs: int, run_of: Callable[[str], Row]) -> dict[str, list[Row]]:
    """Rows of each mode. The modes take turns, in alternating order."""
    rows: dict[str, list[Row]] = {mode: [] for mode in modes}
    for turn in range(pairs):
        for mode in modes if turn % 2 == 0 else modes[::-1]:
            rows[mode].append(run_of(mode))
    return rows


def ratios(rows: dict[str, list[Row]], mode: str, against: str, what: str = "step_s") -> dict[str, float]:
    """Of the seconds of neighbours: the median, the least and the most."""
    pairs = [a[what] / b[what] for a, b in zip(rows[mode], rows[against], strict=True)]
    return {"median": median(pairs), "least": min(pairs), "most": max(pairs)}


def told_of_modes(rows: dict[str, list[Row]], what: str = "step_s") -> Row:
    """Whether the bits of all runs are the same, and each mode's run of middle length."""
    middle = {mode: sorted(some, key=lambda row: row[what])[len(some) // 2] for mode, some in rows.items()}
    return {"bitwise": len({row["digest"] for some in rows.values() for row in some}) == 1, "modes": middle}


def one(name: str, pairs: int, steps: int) -> Row:
    """All that is told of a workload's steps."""
    with tempfile.TemporaryDirectory() as scratch:

        def child(mode: str) -> Row:
            environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if mode == "huge" else {}
            return child_of("steps", [name, mode, scratch], steps, environment)

        found: Row = {"workload": name} | child("make")
        rows = in_modes(TIMED, pairs, child)
        by_hook = child("bytes")
    found |= {f"{mode}_against_{other}": ratios(rows, mode, other) for mode, other in COMPARED}
    physical_bytes = by_hook["physical_peak_bytes"]
    within = {"physical_peak_bytes": physical_bytes, "within_budget": physical_bytes <= found["budget_bytes"]}
    return found | within | told_of_modes(rows | {"bytes": [by_hook]})


def child_of(what: str, one: Sequence[str], steps: int, environment: dict[str, str] | None = None) -> Row:
    return answer_of("benchmarks.arena", [what, "--one", *one, "--steps", str(steps)], environment)


def line(row: Row) -> str:
    told = [f"{mode}/{other} {row[f'{mode}_against_{other}']['median']:.3f}" for mode, other in COMPARED]
    served = row["modes"]["on"]
    not_served = len(served.get("not_served", [])) if served.get("arena_bytes") else "NOT USED"
    return (
        f"{row['workload']:11} {'same bits' if row['bitwise'] else 'OTHER BITS'}; {', '.join(told)}; faults a step "
        f"{row['modes']['off']['faults']:.0f} -> {served['faults']:.0f}; physical "
        f"{row['physical_peak_bytes'] / MIB:.0f} of {row['budget_bytes'] / MIB:.0f} MiB; "
        f"not served {not_served}"
    )


# -- forward passes ---------------------------------------------------------------------------------------------------


class MeasuredPasses(MeasuredSteps):
    """Forward alone. The first one is ordinary, and two are written down."""

    def _step(self) -> float:
        return float(self._workload.step())

    def found(self) -> Row:
        told = super().found()
        return {"pass_s": told["step_s"]} | {name: told[name] for name in ("processor_s", "faults", "digest")}


def make_pass(name: str) -> Row:
    """The figures of its profile: bytes, which no clock decides."""
    workload = fresh(name)
    profile = profile_pass(workload.step, model=workload.model, workload=name, iterations=1, warmup=1)
    taken_bytes = profile.arena_bytes + profile.outside_bytes
    return {figure: getattr(profile, figure) for figure in FIGURES} | {
        "blocks": len(profile.blocks),
        "static_bytes": sum(profile.static_bytes.values()),
        "taken_bytes": taken_bytes,
        "less_than_separate": 1 - taken_bytes / profile.total_bytes,
        "less_than_caching": 1 - taken_bytes / profile.caching_bytes,
        "above_live": profile.arena_bytes / max(1, profile.arena_live_bytes) - 1,
    }


def run_passes(name: str, mode: str, passes: int) -> Row:
    workload = fresh(name)
    workload.model.eval()
    torch.manual_seed(1)
    seen = MeasuredPasses(workload)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        arena = stack.enter_context(poochplan.arena(workload.model)) if mode == "arena" else None
        seen.go(passes)
        if arena is None:
            return seen.found()
        told = arena.report()
    served = {"arena_bytes": told.size_bytes, "served": told.served, "served_bytes": told.served_bytes}
    return seen.found() | served | {"not_served": told.unplanned + told.taken, "layouts": told.layouts}


def one_network(name: str, pairs: int, passes: int) -> Row:
    def child(mode: str) -> Row:
        return child_of("passes", [name, mode, ""], passes)

    found = {"workload": name} | child("make")
    rows = in_modes(PASSES, pairs, child)
    compared = {"arena_against_plain": "pass_s", "arena_against_plain_processor": "processor_s"}
    told = {key: ratios(rows, "arena", "plain", what) for key, what in compared.items()}
    return found | told | told_of_modes(rows, "pass_s")


def pass_line(row: Row) -> str:
    served, plain = row["modes"]["arena"], row["modes"]["plain"]
    ratio, processor = row["arena_against_plain"], row["arena_against_plain_processor"]
    return (
        f"{row['workload']:11} {'same bits' if row['bitwise'] else 'OTHER BITS'}; arena/plain {ratio['median']:.3f} "
        f"({ratio['least']:.3f} to {ratio['most']:.3f}), processor "
        f"{processor['median']:.3f}; faults {plain['faults']:.0f} -> {served['faults']:.0f}; "
        f"arena {row['arena_bytes'] / MIB:.1f} MiB, {row['above_live']:.1%} above live; less than separate "
        f"{row['less_than_separate']:.1%}, than the caching allocator {row['less_than_caching']:.1%}; "
        f"not served {served['not_served']}"
    )


# -- room for a learned arena -----------------------------------------------------------------------------------------


def learned_rows(name: str, profile: Profile, kept: float) -> list[Row]:
    """What was learned of the steps of one plan; none where no arena fits the budget."""
    plan = poochplan.plan(profile, budget_of(profile, kept), time_limit_s=20)
    if not plan.holds_arena:
        return []
    rows: list[Row] = []

    def learned(blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
        """Packs as the session would, and notes what a step that was learned from took."""
        every = [Block(*block) for block in blocks]
        quick = pack(every, LOOKS_PER_BLOCK * len(every))
        started_s = time.perf_counter()
        offsets, size_bytes = packed(blocks, room_bytes)
        row = {"blocks": len(every), "room_bytes": room_bytes, "live_bytes": quick.lower_bound_bytes}
        row |= {"quick_bytes": quick.arena_bytes, "arena_bytes": size_bytes}
        rows.append(row | {"seconds": time.perf_counter() - started_s})
        return offsets, size_bytes

    workload = fresh(name)
    torch.manual_seed(1)
    with poochplan.apply(plan, workload.model, arena="on", planner=PLANNER._replace(pack=learned)) as session:
        for _ in range(LEARNED_STEPS):
            one_step(workload)
        report = session.report().arena
    found = plan.prediction
    told = {
        "workload": name,
        "kept": kept,
        "budget_bytes": plan.budget_bytes,
        "planned_peak_bytes": found.arena_peak_bytes,
        "planned_bytes": found.arena_bytes,
        "planned_live_bytes": found.arena_live_bytes,
        "overhead": found.overhead,
        "notes": plan.notes,
        "is_used": report is not None and report.size_bytes > 0,
        "unserved": len(report.unserved) if report else 0,
    }
    return [told | row for row in rows]


def room_line(row: Row) -> str:
    above = (row[f"{name}_bytes"] / row["planned_bytes"] - 1 for name in ("quick", "arena", "room"))
    shares = (row["live_bytes"] / row["planned_live_bytes"] - 1, *above)
    cells = (row["workload"], f"{row['kept']:.0%}", f"{row['planned_bytes'] / MIB:.1f}")
    return table_row(*cells, *(f"{share:+.2%}" for share in shares), f"{row['seconds']:.2f}", yes(row["is_used"]))


def room_rows(name: str, shares: list[float]) -> list[Row]:
    profile = profiled(fresh(name), name, iterations=3)
    return [row for kept in shares for row in learned_rows(name, profile, kept)]


def main() -> None:
    parser = parser_of(__doc__, workloads=",".join(WORKLOADS), pairs=3, steps=10, kept=[0.3, 0.6, 0.9])
    parser.add_argument("what", nargs="?", choices=("steps", "passes", "room"), default="steps")
    parser.add_argument("--one", nargs=3, metavar=("WORKLOAD", "MODE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = asked.workloads.split(",")
    if asked.one:
        name, mode, folder = asked.one
        made = mode == "make"
        if asked.what == "passes":
            print(json.dumps(make_pass(name) if made else run_passes(name, mode, asked.steps)))
        else:
            print(json.dumps(make(name, Path(folder)) if made else run(name, mode, Path(folder), asked.steps)))
    elif asked.what == "steps":
        taken(asked, names, lambda name: one(name, asked.pairs, asked.steps), line)
    elif asked.what == "passes":
        taken(asked, names, lambda name: one_network(name, asked.pairs, asked.steps), pass_line)
    else:
        print(table_head("workload", "kept", "planned MiB", "live", "quick", "learned", "room", "s", "used"))
        taken(asked, names, lambda name: room_rows(name, asked.kept), room_line)


if __name__ == "__main__":
    main()

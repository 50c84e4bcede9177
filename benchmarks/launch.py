"""What the calling thread spends: CPU time of a planned step over that of a plain one, on a stand-in for a GPU.

GPT-2 with 24 narrow layers (``launch_network.py``), so that nearly all of a step is launching. Its storages lie in host
memory and its ops are the CPU's, but the runtime makes the Python calls that it makes on CUDA (``launch_device.py``).
Each planned step is paired with one in ``session.away()``, in alternating order; a step is forward and backward.

The plans are those in ``launch_plans/``: random ones (keep, swap, replay, mixed) and the planner's own at a third of
memory. Beside them stand ``keep-recorded``, which keeps everything and records all of forward, and two floors: an
empty dispatch mode around forward, and saved-tensors hooks that do nothing. Costs are what a plan adds, in units of the
run's plain op: the plain step over the number of its ops, views left out.

    python -m benchmarks.launch -o benchmarks/results/launch.json   # all plans, 40 pairs each: some 2 minutes
    python -m benchmarks.launch --plans swap,mixed --copies cupy    # copies as with CuPy, or as torch's
    python -m benchmarks.launch --quick                             # 2 pairs: does it run?
    python -m benchmarks.launch --make-plans                        # profile here, and write the plans anew
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import poochplan
from benchmarks.facts import PACKAGES, facts_of_run, write_results
from benchmarks.launch_device import COPIES, StandIn, stand_in
from benchmarks.launch_network import RECORDED, SEED, THIRD, WEIGHTS, Counts, counted, load_plan, make_plans, network
from benchmarks.pairs import ratio_of_pairs

PLANS = ("keep", RECORDED, "swap", "replay", "mixed", THIRD)
PAIRS, WARM_STEPS = 40, 3
EMPTY_MODE, MINIMAL_HOOKS = "empty mode", "minimal hooks"


class Seconds(NamedTuple):
    """CPU time of the calling thread."""

    forward_s: float
    backward_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s


Around = Callable[[], contextlib.AbstractContextManager[Any]]
Pairs = list[tuple[Seconds, Seconds]]
"""(plain, planned)."""


class Empty(TorchDispatchMode):
    """The least that a dispatch mode can do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Bench:
    """One model, stepped in many ways."""

    def __init__(self, pairs: int) -> None:
        self.model, self._forward = network()
        self.pairs = pairs
        self.counts = counted(self._forward)

    def step(
        self, around_step: Around = contextlib.nullcontext, around_forward: Around = contextlib.nullcontext
    ) -> Seconds:
        self.model.zero_grad(set_to_none=True)
        with around_step():
            start_s = time.thread_time()
            with around_forward():
                loss = self._forward()
            middle_s = time.thread_time()
            loss.backward()  # type: ignore[no-untyped-call]
            return Seconds(middle_s - start_s, time.thread_time() - middle_s)

    def _paired(self, plain: Callable[[], Seconds], other: Callable[[], Seconds]) -> Pairs:
        for _ in range(WARM_STEPS):
            plain()
            other()
        found: Pairs = []
        for index in range(self.pairs):
            if index % 2:
                second = other()
                found.append((plain(), second))
            else:
                first = plain()
                found.append((first, other()))
        return found

    def floors(self) -> dict[str, Pairs]:
        """Plain steps against ones with a mode, and ones with hooks, that do nothing."""

        def hooks() -> contextlib.AbstractContextManager[Any]:
            return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

        return {
            EMPTY_MODE: self._paired(self.step, lambda: self.step(around_forward=Empty)),
            MINIMAL_HOOKS: self._paired(self.step, lambda: self.step(around_step=hooks)),
        }

    def under(self, plan: poochplan.Plan, device: Callable[[], StandIn]) -> tuple[Pairs, dict[str, Any]]:
        """The pairs, and what the session's last step did."""
        with poochplan.apply(plan, self.model, meter="never", device=device) as session:
            found = self._paired(lambda: self.step(session.away), self.step)
            report = session.report()
        decisions = Counter(value.decision.value for value in plan.values)
        return found, {
            "decisions": dict(decisions),
            "handles": len(plan.handles),
            "points_with_actions": len(plan.schedule),
            "fallbacks": report.total.fallbacks,
            "replayed_values": report.last_step.replayed_values,
            "out_bytes": report.last_step.out_bytes,
        }


def summary(pairs: Pairs) -> dict[str, Any]:
    """Ratios of planned to plain steps; the mean over the median tells of the collector's spikes."""
    found: dict[str, Any] = {"pairs": len(pairs)}
    for name in ("step_s", "forward_s", "backward_s"):
        found[name.removesuffix("_s")] = ratio_of_pairs(
            [(getattr(plain, name), getattr(planned, name)) for plain, planned in pairs]
        )
    for index, name in enumerate(("plain", "planned")):
        steps_s = [pair[index].step_s for pair in pairs]
        found[f"{name}_mean_over_median"] = round(float(np.mean(steps_s) / np.median(steps_s)), 3)
    return found


def added(pairs: Pairs, part: str) -> float:
    """What a part of the step takes more than plain, in plain steps: the median of the pairs."""
    return float(np.median([(getattr(b, part) - getattr(a, part)) / a.step_s for a, b in pairs]))


def costs(found: dict[str, Pairs], facts: dict[str, dict[str, Any]], counts: Counts) -> dict[str, float]:
    """What one of each adds, in plain ops, as far as the plans that tell it were run."""
    priced: dict[str, float] = {
        "empty mode, an op": added(found[EMPTY_MODE], "forward_s") / counts.forward_ops,
        "minimal hooks, a pack and its unpack": added(found[MINIMAL_HOOKS], "step_s") / counts.packs,
    }
    if "keep" in found:
        hooks = added(found["keep"], "step_s")
        priced["a pack and its unpack"] = hooks / counts.packs
        priced["the same, by handles of the plan"] = hooks / facts["keep"]["handles"]
    if {"keep", RECORDED} <= found.keys():
        recording = added(found[RECORDED], "forward_s") - added(found["keep"], "forward_s")
        priced["a recorded op"] = recording / counts.forward_ops
    if {"keep", "swap"} <= found.keys():
        swapping = added(found["swap"], "step_s") - added(found["keep"], "step_s")
        priced["a swapped value"] = swapping / facts["swap"]["decisions"]["swap"]
    if {RECORDED, "replay"} <= found.keys():
        replaying = added(found["replay"], "step_s") - added(found[RECORDED], "step_s")
        priced["a replayed value"] = replaying / max(1, facts["replay"]["replayed_values"])
    return {name: round(cost * counts.ops, 2) for name, cost in priced.items()}


def measured(names: list[str], pairs: int, copies: str) -> dict[str, Any]:
    """Everything that is reported of one run."""
    bench = Bench(pairs)
    found = bench.floors()
    facts: dict[str, dict[str, Any]] = {}
    with stand_in(copies) as device:
        for name in names:
            found[name], facts[name] = bench.under(load_plan(name), device)
            print(table_row(name, summary(found[name])), flush=True)
    counts = bench.counts
    plain_s = float(np.median([plain.step_s for pairs_of in found.values() for plain, _ in pairs_of]))
    plain_op_us = plain_s / counts.ops * 1e6
    priced = costs(found, facts, counts)
    return {
        "seed": SEED,
        "counts": {**counts._asdict(), "ops": counts.ops},
        "plain_step_s": round(plain_s, 6),
        "plain_op_us": round(plain_op_us, 3),
        "costs_in_plain_ops": priced,
        "costs_us": {name: round(cost * plain_op_us, 1) for name, cost in priced.items()},
        "plans": {name: summary(found[name]) | facts[name] for name in names},
        "floors": {name: summary(found[name]) for name in (EMPTY_MODE, MINIMAL_HOOKS)},
    }


def table_row(name: str, row: dict[str, Any]) -> str:
    """One line of the Markdown table: ratio to plain with its interval, forward, backward, means over medians."""
    step = row["step"]
    low, high = step["interval_95"]
    plain_ms, planned_ms = (1e3 * value for value in step["median_s"])
    return (
        f"| {name} | {plain_ms:.1f} | {planned_ms:.1f} | {step['median_ratio']:.2f} ({low:.2f} to {high:.2f}) "
        f"| {row['forward']['median_ratio']:.2f} | {row['backward']['median_ratio']:.2f} "
        f"| {row['plain_mean_over_median']:.2f} | {row['planned_mean_over_median']:.2f} |"
    )


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", default=",".join(PLANS), help="which, by commas (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of steps a plan (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 pairs")
    parser.add_argument("--copies", choices=COPIES, default=COPIES[0], help="who makes them (default: %(default)s)")
    parser.add_argument("--cupy", dest="copies", action="store_const", const="cupy", help="the same as --copies cupy")
    parser.add_argument("--make-plans", action="store_true", help=f"write those of {', '.join((*WEIGHTS, THIRD))} anew")
    parser.add_argument("-o", "--output", help="write the results as JSON here")
    arguments = parser.parse_args(words)
    names = arguments.plans.split(",")
    if unknown := [name for name in names if name not in PLANS]:
        parser.error(f"--plans: expected some of {', '.join(PLANS)}, found {', '.join(unknown)}")
    torch.set_num_threads(1)
    if arguments.make_plans:
        make_plans()
        return 0
    print("| plan | plain ms | planned ms | ratio (95%) | forward | backward | plain mean/median | planned's |")
    print("|---|---|---|---|---|---|---|---|")
    found = measured(names, 2 if arguments.quick else arguments.pairs, arguments.copies)
    print(f"plain op {found['plain_op_us']:.1f} us ({found['counts']['ops']} ops); what one adds, in plain ops:")
    for name, cost in found["costs_in_plain_ops"].items():
        print(f"  {name}: {cost:.2f}")
    write_results(arguments.output, facts_of_run(arguments, (*PACKAGES, "transformers")) | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the calling thread spends: CPU time of a planned step over that of a plain one, on a stand-in for a GPU.

GPT-2 with 24 narrow layers, so that nearly all of a step is launching. Its storages lie in host
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

import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import poochplan
from benchmarks.facts import PACKAGES, Row, facts_of_run, parser_of, table_head, table_row, write_results
from benchmarks.launch_device import COPIES, StandIn, stand_in
from benchmarks.pairs import in_pairs, profiled, ratio_of_pairs
from benchmarks.plans import part_budget
from poochplan.tensors.operators import traits
from poochplan.workload import Workload
from tests.runtime.nets import LINK
from tests.runtime.random_plans import random_plan

FOLDER = Path(__file__).parent / "launch_plans"
SEED = 0
"""Of the parameters and the tokens, of the random plans and of the planner."""
WEIGHTS = {"keep": (1, 0, 0), "swap": (0, 1, 0), "replay": (0, 0, 1), "mixed": (1, 2, 2)}
"""Random plans by what they draw from: keep, swap, recompute. Those that recompute record all of forward."""
THIRD = "third"
"""The planner's own, at a third of what is not there all the time, or the smallest budget that has a plan."""
RECORDED = "keep-recorded"
"""Keeps everything and records all of forward: what recording takes by itself. Made from ``keep``, not a file."""
EVALUATIONS = 2000
LAYERS, WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 24, 64, 4, 32, 2, 512

Step = Callable[[], torch.Tensor]
PLANS = ("keep", RECORDED, "swap", "replay", "mixed", THIRD)
PAIRS, WARM_STEPS = 40, 3
EMPTY_MODE, MINIMAL_HOOKS = "empty mode", "minimal hooks"


class Counts(NamedTuple):
    """Of one plain step. Ops are those that take memory or write: views are left out, as in a profile."""

    forward_ops: int
    backward_ops: int
    views: int
    packs: int
    """Also of parameters."""

    @property
    def ops(self) -> int:
        return self.forward_ops + self.backward_ops


def network() -> tuple[nn.Module, Step]:
    """The same model each time, and its step: the loss of one fixed batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it speaks of tokens that nothing here has
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": 2 * TOKENS}
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False)
    ).train()
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[bool] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[traits(func).pure_view] += 1
        return func(*args, **(kwargs or {}))


def counted(step: Step) -> Counts:
    """Runs one plain step."""
    packs = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packs
        packs += 1
        return tensor

    with _Counting() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step()
    with _Counting() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return Counts(forward.seen[False], backward.seen[False], forward.seen[True] + backward.seen[True], packs)


def make_plans() -> None:
    """Profiles the network here and writes the plans anew."""
    model, step = network()
    workload = Workload(model, step, torch.optim.AdamW(model.parameters()))
    profile = profiled(workload, "gpt2-24", iterations=1, link=LINK)
    plans = {name: random_plan(profile, SEED, weights) for name, weights in WEIGHTS.items()}
    plans[THIRD] = poochplan.plan(profile, part_budget(profile, 3), evaluations=EVALUATIONS, seed=SEED)
    FOLDER.mkdir(exist_ok=True)
    for name, plan in plans.items():
        print(f"Wrote {plan.save(_path(name), force=True)}")


def load_plan(name: str) -> poochplan.Plan:
    """A committed plan, or ``RECORDED``."""
    if name == RECORDED:
        return msgspec.structs.replace(load_plan("keep"), record_from_start=True)
    return poochplan.Plan.load(_path(name))


def _path(name: str) -> Path:
    return FOLDER / f"{name}.json.gz"


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
        return in_pairs(plain, other, self.pairs)

    def floors(self) -> dict[str, Pairs]:
        """Plain steps against ones with a mode, and ones with hooks, that do nothing."""

        def hooks() -> contextlib.AbstractContextManager[Any]:
            return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

        return {
            EMPTY_MODE: self._paired(self.step, lambda: self.step(around_forward=Empty)),
            MINIMAL_HOOKS: self._paired(self.step, lambda: self.step(around_step=hooks)),
        }

    def under(self, plan: poochplan.Plan, device: Callable[[], StandIn]) -> tuple[Pairs, Row]:
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


def summary(pairs: Pairs) -> Row:
    """Ratios of planned to plain steps; the mean over the median tells of the collector's spikes."""
    found: Row = {"pairs": len(pairs)}
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


def costs(found: dict[str, Pairs], facts: dict[str, Row], counts: Counts) -> dict[str, float]:
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


def measured(names: list[str], pairs: int, copies: str) -> Row:
    bench = Bench(pairs)
    found = bench.floors()
    facts: dict[str, Row] = {}
    with stand_in(copies) as device:
        for name in names:
            found[name], facts[name] = bench.under(load_plan(name), device)
            print(line(name, summary(found[name])), flush=True)
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


def line(name: str, row: Row) -> str:
    """Of the Markdown table: ratio to plain with its interval, forward, backward, means over medians."""
    step = row["step"]
    ratios = (row["forward"]["median_ratio"], row["backward"]["median_ratio"])
    means = (row["plain_mean_over_median"], row["planned_mean_over_median"])
    return table_row(
        name,
        *(f"{1e3 * seconds:.1f}" for seconds in step["median_s"]),
        "{:.2f} ({:.2f} to {:.2f})".format(step["median_ratio"], *step["interval_95"]),
        *(f"{ratio:.2f}" for ratio in (*ratios, *means)),
    )


def main(words: list[str] | None = None) -> int:
    parser = parser_of(
        __doc__, "python -m benchmarks.launch", plans=",".join(PLANS), pairs=PAIRS, quick=(False, "2 pairs")
    )
    parser.add_argument("--copies", choices=COPIES, default=COPIES[0], help="who makes them (default: %(default)s)")
    parser.add_argument("--cupy", dest="copies", action="store_const", const="cupy", help="the same as --copies cupy")
    parser.add_argument("--make-plans", action="store_true", help=f"write those of {', '.join((*WEIGHTS, THIRD))} anew")
    arguments = parser.parse_args(words)
    names = arguments.plans.split(",")
    if unknown := [name for name in names if name not in PLANS]:
        parser.error(f"--plans: expected some of {', '.join(PLANS)}, found {', '.join(unknown)}")
    torch.set_num_threads(1)
    if arguments.make_plans:
        make_plans()
        return 0
    columns = ("plan", "plain ms", "planned ms", "ratio (95%)", "forward", "backward", "plain mean/median")
    print(table_head(*columns, "planned's"))
    found = measured(names, 2 if arguments.quick else arguments.pairs, arguments.copies)
    print(f"plain op {found['plain_op_us']:.1f} us ({found['counts']['ops']} ops); what one adds, in plain ops:")
    for name, cost in found["costs_in_plain_ops"].items():
        print(f"  {name}: {cost:.2f}")
    write_results(arguments.output, facts_of_run(arguments, (*PACKAGES, "transformers")) | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

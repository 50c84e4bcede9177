"""Whole training loops as they are and under ``poochplan.auto``: seconds in all, and when the plan came.

    python -m benchmarks.loops --loops unet3d llama -o loops.json   # workloads, and those of stack_loops.py

Each loop in a process of its own: with ``auto`` and empty caches, and with ``auto`` again, each in turns with a plain
one (``benchmarks/turns.py``). Seconds are from before the ``with`` block to behind it, without imports and the making
of the model, which all share. ``bitwise``: whether the parameters are those of the plain loop. ``memory_mib``: the most
that was resident, less the plain loop's. ``most``: the share of the budget that steps under a plan took, by a meter
from outside (``tests/allocated_bytes.py``); None where nothing was planned.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.facts import parser_of, taken
from benchmarks.stack_loops import STACKS, Around, GoesOn, looped
from benchmarks.turns import Turn, in_turns
from tests.allocated_bytes import allocated_bytes

LOOPS: dict[str, tuple[str, dict[str, str]]] = {
    "gpt2": ("gpt2", {}),
    "unet3d": ("unet3d", {}),
    "char_rnn": ("char_rnn", {}),
    "bert": ("bert", {}),
    "resnet50": ("resnet50", {"batch_size": "8"}),
    "seq2seq": ("seq2seq", {}),
}
SHORT_S = 4.0
"""Seconds of the plain loop that says how many steps a loop has."""
LAST = 20
"""Steps at the end of which the median is told."""


class Watched:
    """State: what the steps of a loop took, and when it was planned. ``seconds`` of 0: it ends behind so many steps."""

    def __init__(self, turn: Turn, budget: str, seconds: float, steps: int) -> None:
        self._turn = turn
        self.took, self.most = list[float](), 0.0
        self.planned: dict[str, Any] | None = None
        self._counted, self._model = (0, 0), None
        self._budget, self._seconds, self._steps = budget, seconds, steps
        self._meter = allocated_bytes()
        self._before_bytes = self._meter.live
        self.start_s = self._last_s = 0.0
        self.session: Any = None

    @contextlib.contextmanager
    def around(self, model: Any, optimizer: Any) -> Iterator[Any]:
        import torch

        import poochplan

        torch.manual_seed(0)
        self._model = model
        if not self.start_s:
            self._turn.wait()
            self.start_s = time.perf_counter()
        self._last_s = time.perf_counter()
        auto = poochplan.auto(model, optimizer, budget=self._budget) if self._budget else contextlib.nullcontext()
        with auto as session:
            self.session = session
            yield session
        self.total_s = time.perf_counter() - self.start_s

    def goes_on(self, session: Any) -> bool:
        """A step is over; whether another is to come."""
        now_s = time.perf_counter()
        self.took.append(now_s - self._last_s)
        if session is not None and session.plan is not None:
            self._look(session, now_s)
        self._meter.restart()
        self._turn.step_ended()
        self._last_s = time.perf_counter()
        return len(self.took) < self._steps or (not self._steps and now_s - self.start_s < self._seconds)

    def _look(self, session: Any, now_s: float) -> None:
        """A step is over, and there is a plan; whether it has followed it throughout."""
        report = session.report()
        counted = report.steps_followed, report.total.steps
        followed, steps = (now - then for now, then in zip(counted, self._counted, strict=True))
        self._counted = counted
        if not followed:
            return
        self.planned = self.planned or {"step": len(self.took), "s": round(now_s - self.start_s, 1)}
        if followed == steps:
            arena_bytes = report.arena.size_bytes if report.arena is not None else 0
            peak_bytes = self._meter.peak - self._before_bytes + arena_bytes
            self.most = max(self.most, peak_bytes / session.plan.budget_bytes)

    def digest(self) -> str:
        """Of the parameters."""
        digest = hashlib.sha256()
        for model in self._model.values() if isinstance(self._model, dict) else [self._model]:
            for parameter in model.parameters():
                digest.update(parameter.detach().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


def trained(name: str, budget: str, seconds: float, steps: int) -> dict[str, Any]:
    """The loop in this process: so many ``steps``, or as many as ``seconds`` have room for; plain without a budget."""
    turn = Turn()  # before any module takes the clock by its name
    import torch

    from poochplan.tensors.operators import past_first_calls

    past_first_calls()
    torch.manual_seed(0)
    watched = Watched(turn, budget, seconds, steps)
    (STACKS[name] if name in STACKS else partial(of_workload, name))(watched.around, watched.goes_on)
    session = watched.session
    return {
        "total_s": round(watched.total_s, 2),
        "steps": len(watched.took),
        "last_s": round(median(watched.took[-LAST:]), 4),
        "planned": watched.planned,
        "served": session is not None and session.arena is not None,
        "most": round(watched.most, 4) or None,
        "promised_s": None if session is None or session.plan is None else session.plan.prediction.step_s,
        "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "digest": watched.digest(),
    }


def of_workload(name: str, around: Around, goes_on: GoesOn) -> None:
    """The loop of one of the package's own workloads."""
    from benchmarks.pairs import load, one_step

    workload = load(*LOOPS[name])

    def step(_: int) -> None:
        one_step(workload)
        workload.model.zero_grad()  # what the meter sees next is to begin without gradients, which lie in an arena

    looped(workload.model, around, goes_on, step, workload.optimizer)


def trained_in_turns(name: str, cache: str, runs: list[tuple[str, float, int]]) -> list[dict[str, Any]]:
    """The loop in several processes, each with its budget, seconds and steps, which share a cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{number}.json" for number in range(len(runs))]
        commands = [["-m", "benchmarks.loops", "--one", name, *map(str, run)] for run in runs]
        in_turns(commands, [{**os.environ, "XDG_CACHE_HOME": cache}] * len(runs), outputs)
        return [_found(output) for output in outputs]


def _found(output: Path) -> dict[str, Any]:
    errors, printed = output.with_suffix(".err").read_text().splitlines(), output.read_text().splitlines()
    if not printed:
        return {"failed": (errors or ["it says nothing"])[-1]}
    said = [line[line.index("poochplan:") :] for line in errors if "poochplan:" in line]
    return {**json.loads(printed[-1]), "said": said[1:]}


def row_of(name: str, budget: str, seconds: float, runs: int) -> dict[str, Any]:
    """So many runs under ``auto`` that share a cache, each in turns with a plain one, of one loop."""
    with tempfile.TemporaryDirectory() as cache:
        short = trained_in_turns(name, cache, [("", SHORT_S, 0)])[0]
        if "failed" in short:
            return {"loop": name, **short}
        steps = max(LAST, int(short["steps"] * seconds / short["total_s"]))
        pairs = [trained_in_turns(name, cache, [("", 0, steps), (budget, 0, steps)]) for _ in range(runs)]
    told = {
        key: run
        if "failed" in run
        else {
            **{part: run[part] for part in ("total_s", "last_s", "planned", "served", "most", "promised_s", "said")},
            "plain_s": plain["total_s"],
            "plain_step_s": plain["last_s"],
            "ratio": round(run["total_s"] / plain["total_s"], 3),
            "last_ratio": round(run["last_s"] / plain["last_s"], 3),
            "memory_mib": run["resident_mib"] - plain["resident_mib"],
            "bitwise": run["digest"] == plain["digest"],
        }
        for key, (plain, run) in zip(("first", "second"), pairs, strict=False)
    }
    return {"loop": name, "steps": steps, **told}


def main() -> None:
    parser = parser_of(__doc__, seconds=(60.0, "of the plain loop"), budget="70%")
    parser.add_argument("--loops", nargs="+", choices=(*LOOPS, *STACKS), default=list(LOOPS))
    parser.add_argument("--runs", type=int, choices=(1, 2), default=2, help="under auto (default: 2)")
    parser.add_argument("--one", nargs=4, metavar=("LOOP", "BUDGET", "SECONDS", "STEPS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        name, budget, seconds, steps = asked.one
        print(json.dumps(trained(name, budget, float(seconds), int(steps))))
        return
    packages = ("torch", "transformers", "peft", "accelerate", "lightning", "monai")
    taken(asked, asked.loops, lambda name: row_of(name, asked.budget, asked.seconds, asked.runs), packages=packages)


if __name__ == "__main__":
    main()

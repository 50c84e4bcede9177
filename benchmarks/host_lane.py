"""What it is worth that the planner knows the launching thread: two plans of one network of small ops, in pairs.

    python -m benchmarks.host_lane [--pairs 40] [-o benchmarks/results/host-lane.json]

The network is an LSTM unrolled cell by cell, with a projection to a vocabulary behind it: thousands of ops of some tens
of microseconds, hundreds of saved values of some tens of KiB, and a few large ones. Both plans are for the same budget
and from the same profile; for the old one, what the thread takes (``Profile.runtime``) is removed first. The link is
held to a known rate. Each round opens a session for either plan, in alternating order, and in it runs plain and planned
steps in turn.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import msgspec
import torch
from torch import nn

import poochplan
from benchmarks.facts import Row, facts_of_run, parser_of, write_results
from benchmarks.pairs import Seconds, compared, one_step, profiled
from benchmarks.plans import budget_of, decisions_of
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.schedule import schedule_of
from poochplan.planner.simulator.simulate import Simulation, simulate
from poochplan.profiler.trials.machine_facts import measured_on
from poochplan.tensors.host_memory import freed_memory_given_back
from poochplan.workload import Workload

PLANS = ("old", "new")
"""Planned without and with what the launching thread takes."""
Round = dict[str, tuple[Seconds, Seconds]]
"""Per plan: a plain step, and a planned one of the same session."""


class Cells(nn.Module):
    """An LSTM, cell by cell, and what it predicts of the next token at each."""

    def __init__(self, vocabulary: int, width: int, steps: int) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(vocabulary, width), nn.LSTMCell(width, width)
        self.out = nn.Linear(width, vocabulary)
        self.steps = steps

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.embed(tokens)
        hidden, state, outputs = inputs.new_zeros(inputs[:, 0].shape), inputs.new_zeros(inputs[:, 0].shape), []
        for step in range(self.steps):
            hidden, state = self.cell(inputs[:, step], (hidden, state))
            outputs.append(hidden)
        return self.out(torch.stack(outputs, 1))


def workload(arguments: argparse.Namespace) -> Workload:
    torch.manual_seed(0)
    model = Cells(arguments.vocabulary, arguments.width, arguments.steps)
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.steps + 1))

    def step() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(model=model, step=step, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))


def quiet_profile(task: Workload, arguments: argparse.Namespace) -> poochplan.Profile:
    """Of several profiles the one with the shortest in-core step: what else runs on the machine makes all longer."""
    taken = []
    for _ in range(arguments.profiles):
        measured_on.cache_clear()
        taken.append(profiled(task, "cells", iterations=15, throttle=arguments.throttle))
    return min(taken, key=lambda profile: profile.times.step_s)


def a_round(task: Workload, plans: dict[str, poochplan.Plan], order: tuple[str, ...], repeats: int) -> Round:
    """For each plan the median of the plain and of the planned steps of one session."""
    found: Round = {}
    for name in order:
        with poochplan.apply(plans[name], task.model, meter="never") as session:
            steps: list[tuple[Seconds, Seconds]] = []
            for _ in range(1 + repeats):
                with session.away():
                    plain = one_step(task)
                steps.append((plain, one_step(task)))
            assert session.report().total.fallbacks == 0
        found[name] = middle([plain for plain, _ in steps[1:]]), middle([planned for _, planned in steps[1:]])
    return found


def middle(steps: list[Seconds]) -> Seconds:
    return median(wall_s for wall_s, _ in steps), median(cpu_s for _, cpu_s in steps)


def described(profile: poochplan.Profile, plan: poochplan.Plan) -> Row:
    """What a plan decides, and what the simulator that knows the thread says of it."""
    problem = build_problem(profile)
    found: Simulation = simulate(problem, schedule_of(plan, problem))
    parts = {f"of_that_{name}": round(getattr(found, name), 5) for name in ("runtime_s", "stall_s", "replay_s")}
    return parts | {
        "decisions": decisions_of(plan),
        "swapped_bytes": found.out_bytes,
        "replays": len({v for action in plan.schedule for v in action.replay}),
        "recording": sum(action.record == "on" for action in plan.schedule) + plan.record_from_start,
        "predicted_peak_bytes": plan.prediction.peak_bytes,
        "own_prediction_ratio": round(plan.prediction.step_s / problem.in_core_s, 4),
        "predicted_ratio": round(found.step_s / problem.in_core_s, 4),
        "predicted_step_s": round(found.step_s, 5),
    }


@freed_memory_given_back()  # as in a session: fresh memory costs the same in all steps
def measured(arguments: argparse.Namespace) -> Row:
    task = workload(arguments)
    profile = quiet_profile(task, arguments)
    without = msgspec.structs.replace(profile, runtime=None)
    budget, limit = budget_of(profile, arguments.share), {"time_limit_s": arguments.seconds}
    plans = {"old": poochplan.plan(without, budget, **limit), "new": poochplan.plan(profile, budget, **limit)}
    row: Row = {
        "ops": len(profile.ops),
        "handles": len(profile.handles),
        "in_core_step_s": round(profile.times.step_s, 5),
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "budget_bytes": budget,
        "runtime": msgspec.to_builtins(profile.runtime),
    }
    for name in PLANS:
        row[name] = described(profile, plans[name])
        print(name, json.dumps(row[name]), flush=True)
    if not arguments.pairs:
        return row
    rounds = [a_round(task, plans, PLANS[:: 1 - 2 * (n % 2)], arguments.repeats) for n in range(arguments.pairs)]
    row["new_over_old"] = compared([(one["old"][1], one["new"][1]) for one in rounds])
    row["plain_over_plain"] = compared([(one["old"][0], one["new"][0]) for one in rounds])
    for name in PLANS:
        row[name]["planned_over_plain"] = compared([one[name] for one in rounds])
    return row


def main() -> None:
    parser = parser_of(
        __doc__,
        vocabulary=512,
        width=64,
        steps=96,
        batch=32,
        share=(0.5, "of the bytes between smallest budget and in-core peak"),
        throttle="200MB/s",
        profiles=(4, "the quietest of so many is taken"),
        pairs=40,
        repeats=3,
        seconds=20.0,
        threads=1,
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    row = measured(arguments)
    for name in ("new_over_old", "plain_over_plain"):
        if name in row:
            print(name, json.dumps(row[name]))
    write_results(arguments.output, facts_of_run(arguments) | row)


if __name__ == "__main__":
    main()

"""A planned step served from one arena, against the same step as it is: seconds, page faults, and what was served.

The sequence of one planned step is recorded, packed and served. No session does so yet: here the points of the plan
are told by standing before ``Follow``. Pairs of steps, one of each kind, right after each other in alternating order.

    python -m benchmarks.served_step [--model gpt2|convolutions] [--budget 60%] [--pairs 20] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import poochplan
from benchmarks.facts import facts_of_run, write_results
from poochplan.planner.arena.packing import Block, Packing, pack
from poochplan.runtime.allocator.allocation_log import MARK, AllocationLog, lifetimes
from poochplan.runtime.allocator.arena import OUTSIDE, SMALLEST_BYTES, Arena, Places
from poochplan.runtime.allocator.scope import ThreadScope
from poochplan.runtime.drivers.follow import Follow

Step = Callable[[], torch.Tensor]
Clock = Callable[[int], None]


def gpt2() -> tuple[nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": 4000, "n_positions": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(0, 4000, (4, 256))
    return model, lambda: model(tokens, labels=tokens).loss


def convolutions() -> tuple[nn.Module, Step]:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(True))

    body = [block(3, 32), block(32, 32), nn.MaxPool2d(2), block(32, 64), block(64, 64), nn.MaxPool2d(2), block(64, 64)]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * 24 * 24, 10))
    images, labels = torch.randn(8, 3, 96, 96), torch.randint(0, 10, (8,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


MODELS = {"gpt2": gpt2, "convolutions": convolutions}


class Points:
    """Tells a clock of each save and use point of a followed plan: 1, 2, ... from the step's begin."""

    def __init__(self) -> None:
        self.clock: Clock = lambda point: None
        self._passed = 0

    def begin(self, clock: Clock) -> None:
        self.clock, self._passed = clock, 0

    @contextmanager
    def told(self) -> Iterator[None]:
        saved, used = Follow.at_save, Follow.at_use

        def at_save(driver: Follow, *rest: Any) -> Any:
            self._tick()
            return saved(driver, *rest)

        def at_use(driver: Follow, *rest: Any) -> Any:
            self._tick()
            return used(driver, *rest)

        Follow.at_save, Follow.at_use = at_save, at_use  # type: ignore[method-assign]
        try:
            yield
        finally:
            Follow.at_save, Follow.at_use = saved, used  # type: ignore[method-assign]

    def _tick(self) -> None:
        self._passed += 1
        self.clock(self._passed)


def packed(events: Any) -> tuple[Arena, Packing]:
    """An arena for what was recorded."""
    found = lifetimes(events, SMALLEST_BYTES)
    dies = np.flatnonzero(found["death"] >= 0)
    packing = pack([Block(int(one["birth"]), int(one["death"]), int(one["size_bytes"])) for one in found[dies]])
    offsets = np.full(len(found), OUTSIDE)
    offsets[dies] = packing.offsets
    return Arena(Places(found["size_bytes"], offsets, found["point"]), packing.arena_bytes), packing


def measure(name: str, budget: str, pairs: int) -> dict[str, object]:
    torch.manual_seed(0)
    model, forward = MODELS[name]()
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    profile = poochplan.profile(forward, model=model)
    plan = poochplan.plan(profile, budget=budget)
    scope, points = ThreadScope(), Points()

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        forward().backward()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    with points.told(), poochplan.apply(plan, model, meter="never"):
        reference = [[gradient.clone() for gradient in step()] for _ in range(3)][-1]
        logs = [_recorded(step, scope, points) for _ in range(3)]
        arena, packing = packed(logs[-1])
        runs = {"as it is": _timed(step, lambda: points.begin(lambda point: None))}
        runs["served"] = _timed(step, lambda: (arena.begin(), points.begin(arena.at)), arena.end)
        rounds = [_both(runs, number) for number in range(pairs)]
        with arena.serving():
            points.begin(arena.at)
            same = all(torch.equal(*pair) for pair in zip(step(), reference, strict=True))
        report = {
            "blocks": len(lifetimes(logs[-1], SMALLEST_BYTES)),
            "births equal in 3 logs": len({_births(log) for log in logs}) == 1,
            "arena_bytes": packing.arena_bytes,
            "lower_bound_bytes": packing.lower_bound_bytes,
            "predicted_peak_bytes": plan.prediction.peak_bytes,
            "resident_bytes": arena.resident_bytes,
            "fates of all steps": {fate: list(tally) for fate, tally in arena.counts().total._asdict().items()},
            "same bits": same,
        }
        arena.close()
    return {"model": name, "budget": budget, "pairs": pairs, **report, **_summary(rounds)}


def _recorded(step: Callable[[], object], scope: ThreadScope, points: Points) -> Any:
    with AllocationLog(scope) as log:
        points.begin(log.mark)
        step()
    return log.events


def _births(events: Any) -> bytes:
    """Sizes and points of what is large enough, to compare."""
    found = lifetimes(events, SMALLEST_BYTES)
    assert (events["kind"] == MARK).any()
    return bytes(found["size_bytes"].tobytes() + found["point"].tobytes())


def _timed(
    step: Callable[[], object], before: Callable[[], object], after: Callable[[], object] = lambda: None
) -> Callable[[], tuple[float, int]]:
    """Seconds and minor page faults of one step."""

    def run() -> tuple[float, int]:
        faults, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        before()
        step()
        after()
        return time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults

    return run


def _both(runs: dict[str, Callable[[], tuple[float, int]]], number: int) -> dict[str, tuple[float, int]]:
    names = list(runs) if number % 2 else list(reversed(runs))
    return {name: runs[name]() for name in names}


def _summary(rounds: list[dict[str, tuple[float, int]]]) -> dict[str, object]:
    ratios = sorted(row["served"][0] / row["as it is"][0] for row in rounds)
    return {
        "median_s": {name: statistics.median(row[name][0] for row in rounds) for name in rounds[0]},
        "ratio served / as it is": {
            "median": statistics.median(ratios),
            "quartiles": ratios[len(ratios) // 4 :: len(ratios) // 2][:2],
        },
        "minor faults a step": {name: statistics.median(row[name][1] for row in rounds) for name in rounds[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("-o", dest="output")
    options = parser.parse_args()
    found = facts_of_run(options) | measure(options.model, options.budget, options.pairs)
    print(json.dumps(found, indent=1))
    write_results(options.output, found)


if __name__ == "__main__":
    main()

"""Gradients are used, so nothing of ours looks on while backward computes them: torch would compute others.

No outside meter here: it is a mode itself, under which the plain loop would have the bits of the watched one.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import poochplan
from poochplan import guard
from poochplan.formats.profile import Phase
from poochplan.profiler.capture import capture as capturing
from poochplan.profiler.capture.node_ops import NodeOps
from poochplan.profiler.capture.workspace import CpuMeter, Workspace
from poochplan.profiler.live.segment_observer import SegmentObserver
from poochplan.runtime.engine.cursor import Segment
from poochplan.torch_private.tensor_internals import mode_count
from tests.depth import todays
from tests.online.networks import BACKWARDS, branches
from tests.online.runs import Run, bytes_of, run_auto, run_plain
from tests.online.trainings import Losses, Training, Turn
from tests.processes import python
from tests.runtime.besides import plain_step
from tests.runtime.nets import LINK
from tests.runtime.served import needs_compiler

UNPLANNED = {"reentrant_checkpoint", "two_losses_of_one_graph", "optimizer_in_backward", "noisy_or"}
"""What they save is used by a later segment, or most of what they take is no activation."""


@dataclass
class Loop:
    """A run, and what each turn left: gradients, to the bit; turns in whose backward there were modes; the kinds of
    observers that were put on; what was told.
    """

    gradients: list[list[bytes]] = field(default_factory=list)
    turns_with_modes: set[int] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    run: Run = field(default_factory=lambda: Run([], [], []))
    said: list[str] = field(default_factory=list)

    def equals(self, other: Loop) -> bool:
        return self.run.equals(other.run) and self.gradients == other.gradients


def run(make: Callable[[], Training], cache: Path | None = None, *, turns: int = 30) -> Loop:
    """Plain without a ``cache``, else under ``auto``."""
    loop = Loop()

    def looked_at() -> Training:
        training = make()
        parameters = list(training.model.parameters())

        def turn(inner: Turn, number: int) -> Losses:
            losses = inner(number)
            loop.gradients.append(bytes_of(one.grad for one in parameters if one.grad is not None))
            return losses

        def look(_: torch.Tensor) -> None:
            if mode_count():
                loop.turns_with_modes.add(len(loop.gradients))

        for parameter in parameters:
            parameter.register_hook(look)
        return training.each(turn)

    begin = SegmentObserver.begin

    def noted(observer: SegmentObserver, segment: Segment) -> None:
        loop.watched.add(type(observer).__name__)
        begin(observer, segment)

    with warnings.catch_warnings(record=True) as told, mock.patch.object(SegmentObserver, "begin", noted):
        warnings.simplefilter("always", RuntimeWarning)  # of loops that are not planned, too
        if cache is None:
            loop.run = run_plain(looked_at, turns, is_metered=False)
        else:
            loop.run = run_auto(looked_at, "80%", cache, turns, is_metered=False, time_limit_s=1.0)
    loop.said = [str(one.message) for one in told]
    return loop


@functools.cache
def without(name: str) -> Loop:
    return run(BACKWARDS[name])


@functools.cache
def under_auto(name: str) -> tuple[Loop, Any]:
    """And its profile. The session goes, with its model: these are not to live beside other loops."""
    with tempfile.TemporaryDirectory() as cache:
        found = run(BACKWARDS[name], Path(cache))
    profile, found.run.session = found.run.session.profile, None
    return found, profile


@pytest.mark.parametrize("name", BACKWARDS)
def test_losses_gradients_and_weights_are_bitwise_the_plain_ones_in_every_turn(name: str) -> None:
    """And no mode is on the stack, whatever watch is on."""
    (found, profile), expected = under_auto(name), without(name)
    assert len(found.gradients) == 30
    assert found.equals(expected)
    assert not found.turns_with_modes
    assert name != "branches" or found.watched == {"Capturing", "PhaseTiming", "OpTiming", "Verifying"}
    assert name in UNPLANNED or found.run.plans[-1]
    assert "checkpoint" not in name or profile.facts.checkpointed == ("inner",)


def test_no_hook_stays_on_nodes_that_outlive_a_step(tmp_path: Path) -> None:
    """As those that accumulate do, where somebody holds them."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in model.parameters()]
    hooks: list[Any] = []
    with poochplan.auto(model, optimizer, budget="95%", cache=tmp_path, quiet=True, link=LINK) as session:
        for _ in range(16):
            plain_step(model, optimizer, data)
        assert [op.name for op in session.profile.ops].count("autograd.AccumulateGrad") == len(held)
    for node in held:
        for handle in (node.register_hook(lambda *_: None), node.register_prehook(lambda *_: None)):
            hooks.append(handle.hooks_dict_ref())
            handle.remove()
    assert not any(hooks)


@pytest.mark.parametrize("told", ["node_begins", "node_ends", "passes_on"])
def test_a_failure_of_looking_on_ends_no_backward(told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session stands aside, and one line says what it was."""

    def fails(*_: Any) -> None:
        raise ArithmeticError("half a node")

    monkeypatch.setattr(guard, "RAISES", False)
    monkeypatch.setattr(NodeOps, told, fails)
    found = run(branches, tmp_path)
    assert found.equals(without("branches"))
    assert found.run.session.profile is None
    assert found.run.session._attachment.has_failed
    (line,) = (line for line in found.said if "half a node" in line)
    assert line.startswith("poochplan: the session stands aside")
    assert "ArithmeticError: half a node (_tell in capture/node_ops.py:" in line
    assert found.turns_with_modes == set()


def test_every_node_is_one_op_that_is_timed() -> None:
    _, profile = under_auto("compiled_beside_branches")
    ops = [op.name for op in profile.ops if op.phase is Phase.BACKWARD]
    assert ops.count("compiled_region") == 4
    assert ops.count("autograd.AccumulateGrad") == 18
    assert all(op.duration_s > 0 for op in profile.ops)
    assert not any("steps differ" in note for note in profile.notes)


PEAKS = """
    from tests.allocated_bytes import allocated_bytes
    meter = allocated_bytes()  # before anything is allocated
    import gc, sys, tempfile, torch, poochplan
    from tests.online.networks import BACKWARDS
    from tests.online.networks import NETWORKS
    from tests.runtime.nets import LINK
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        training = None
        gc.collect()
        before_bytes = meter.live
        training = {**BACKWARDS, **NETWORKS}[name]()
        training.turn(0)
        peaks = []
        for number in range(3):
            meter.restart()
            training.turn(number)
            peaks.append(meter.peak - before_bytes)
        with tempfile.TemporaryDirectory() as folder:
            options = {"budget": "99%", "cache": folder, "quiet": True, "link": LINK, "time_limit_s": 0.1}
            with poochplan.auto(training.model, training.optimizers, **options) as session:
                for number in range(16):
                    training.turn(number)
                print("found", name, max(peaks), session.profile.in_core_peak_bytes)
"""


@needs_compiler
def test_the_in_core_peak_is_what_a_hook_of_the_tests_counts_of_a_plain_step() -> None:
    names = todays(("branches", "checkpoint", "reentrant_checkpoint", "custom_function", "hooked", "packed_recurrent"))
    found = [line.split()[1:] for line in python(PEAKS, *names).splitlines() if line.startswith("found ")]
    assert [name for name, _, _ in found] == list(names)
    for name, measured, predicted in found:
        assert 0.98 * int(predicted) <= int(measured) <= int(predicted), name


@pytest.mark.parametrize("name", ["branches", "checkpoint", "reentrant_checkpoint", "custom_function"])
def test_without_the_allocator_the_in_core_peak_is_about_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = under_auto(name)
    monkeypatch.setattr(capturing, "workspace_of", lambda where: Workspace(CpuMeter))
    missing = run(BACKWARDS[name], tmp_path, turns=12).run.session.profile
    assert beside_what_was_there(missing) == pytest.approx(beside_what_was_there(there), rel=0.01)


def beside_what_was_there(profile: poochplan.Profile) -> int:
    """The in-core peak without other tensors of this process."""
    there = (value for value in profile.values if value.born < 0 and value.born_tick is None)
    return profile.in_core_peak_bytes - sum(profile.rounded_bytes(value.size_bytes) for value in there)

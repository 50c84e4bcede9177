"""Where segments begin and end, and what is known of each when it is over; and the states of a saved value."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.formats.plan import Decision
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.runtime.devices.transfers import copy_in, copy_out
from poochplan.runtime.engine.cursor import Outcome, Segment, StepEvents
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import SavedValue, ValueState
from poochplan.runtime.replays.recipes import Recipe
from poochplan.runtime.replays.tape import Recorder, Tape
from poochplan.runtime.session import Session
from poochplan.runtime.step_policies.step_policy import KeepAll, StepPolicy, SwapEach
from poochplan.tensors.modes import around_calls, uncompiled_hooks
from poochplan.tensors.signatures import input_signature
from poochplan.torch_private.tensor_internals import in_backward
from tests.runtime.adversarial import AdversarialDevice, OpClock
from tests.runtime.detours import gradients_of
from tests.runtime.nets import CASES, Net
from tests.runtime.random_plans import random_plan

pytestmark = pytest.mark.cpu_device


def chain() -> Net:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    return Net(lambda net, batch: net.layers(batch).square().mean(), layers=layers)


class InTurn:
    """Gives one segment a step policy that keeps, the next one that swaps; notes what it knew when it was asked, and
    which segments have ended.
    """

    alternatives = ()

    def __init__(self, *, needs_inputs: bool = False) -> None:
        self.needs_inputs = needs_inputs
        self.chosen: list[Segment] = []
        self.ended: list[Segment] = []

    def choose(self, segment: Segment) -> StepPolicy | None:
        if self.needs_inputs and segment.inputs is None and not segment.saves_next:
            return None
        self.chosen.append(segment)
        return KeepAll() if segment.number % 2 else SwapEach()


@contextmanager
def under(chooser: InTurn, model: nn.Module) -> Iterator[Engine]:
    device = CpuDevice()
    engine = Engine(chooser, device, model, events=StepEvents(ended=chooser.ended.append))

    def called(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if engine.cursor.forward_begins_one():
            engine.begin()
        engine.model_is_called(lambda: input_signature(args, kwargs))

    try:
        with uncompiled_hooks(engine.pack, engine.unpack), around_calls(model, called):
            yield engine
        engine.end()
        engine.tell_end()
    finally:
        device.close()


@contextmanager
def swapping() -> Iterator[tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer, Session]]:
    """A network in a session that swaps."""
    model, step, optimizer = CASES["residual"].fresh()
    with poochplan.apply(random_plan(CASES["residual"].profile(), 0, (0, 1, 0)), model) as session:
        yield model, step, optimizer, session


def test_each_segment_has_the_step_policy_that_was_chosen_for_it_and_the_same_gradients() -> None:
    model, batch, chooser = chain(), torch.ones(4, 8), InTurn()
    wanted = gradients_of(model, model(batch))
    moved = []
    with under(chooser, model) as engine:
        for _ in range(4):
            found = gradients_of(model, model(batch))
            assert all(map(torch.equal, found, wanted))
            moved.append(engine.segment.report.out_bytes)
    assert moved == [0, moved[1], 0, moved[1]]
    assert moved[1] > 0
    assert [segment.outcome for segment in chooser.ended] == [Outcome.USED] * 4


def test_the_bytes_and_the_seconds_of_a_segment_are_told_when_it_is_over() -> None:
    model, batch, chooser = chain(), torch.ones(4, 8), InTurn()
    with under(chooser, model):
        for _ in range(2):
            model(batch).backward()
        assert chooser.ended == chooser.chosen[:1]
    segment = chooser.ended[1]
    assert segment.outcome is Outcome.USED
    assert segment.report.out_bytes > segment.report.in_bytes > 0  # the last one has never left
    assert segment.report.hooks_s > 0
    assert segment.saves == 3
    assert segment.uses == segment.packs > 0


def test_what_a_checkpoint_saves_in_backward_begins_no_segment_though_nothing_of_the_step_is_held_any_more() -> None:
    model, batch, chooser = chain(), torch.ones(4, 8, requires_grad=True), InTurn()

    def inner(rows: torch.Tensor) -> torch.Tensor:
        if not in_backward():  # the outer checkpoint has saved its input, for which a segment has begun
            engine.begin()
        found: torch.Tensor = checkpoint(model.layers, rows, use_reentrant=True)
        return found

    with under(chooser, model) as engine:
        checkpoint(inner, batch, use_reentrant=False).square().mean().backward()
        assert not engine.segment.is_held
        assert (engine.segment.number, engine.segment.used) == (2, True)


def test_a_segment_counts_from_the_last_step_of_an_optimizer_of_the_models() -> None:
    model, batch = chain(), torch.ones(4, 8)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch).backward()
    ordinals = []
    with swapping() as (_, step, optimizer, session):
        for stepping in (None, other, optimizer, None):
            step().backward()
            ordinals.append(session._engine.segment.ordinal)
            if stepping is not None:
                stepping.step()
    assert ordinals == [0, 1, 2, 0]


def test_a_segment_ends_with_the_optimizers_step_once_it_was_used_and_not_before() -> None:
    with swapping() as (_, step, optimizer, session):
        step().backward()
        assert session._engine.cursor.is_open
        optimizer.step()
        assert not session._engine.cursor.is_open
        loss = step()
        optimizer.step()  # of gradients that were there: the new segment waits for its backward
        assert session._engine.cursor.is_open
        del loss


def test_handles_that_outlive_their_segment_are_left_over_and_count_as_there_before_the_next() -> None:
    model, batch, chooser = chain(), torch.ones(4, 8), InTurn()
    with under(chooser, model) as engine:
        loss = model(batch)
        loss.backward(retain_graph=True)
        model(batch).backward()
        first, second = chooser.chosen
        assert first.outcome is Outcome.LEFT_OVER
        assert (first.left_over_bytes, second.left_over_bytes) == (0, 3 * 4 * 8 * 4)
        wanted = gradients_of(model, model(batch))
        assert all(map(torch.equal, gradients_of(model, loss), wanted))
        assert engine.segment.number == 3


def test_a_step_behind_one_that_was_dropped_is_a_new_one_though_handles_of_earlier_ones_live() -> None:
    model, batch, chooser = chain(), torch.ones(4, 8), InTurn()
    with under(chooser, model) as engine:
        kept = model(batch)
        kept.backward(retain_graph=True)
        model(batch)  # thrown away
        model(batch).backward()
        assert engine.segment.number == 3
    assert [segment.outcome for segment in chooser.chosen] == [Outcome.LEFT_OVER, Outcome.UNUSED, Outcome.USED]


def test_what_a_forward_that_raises_has_saved_is_a_segment_that_raised() -> None:
    with swapping() as (model, step, _, session):
        with pytest.raises(ValueError, match="enough"), list(model.modules())[-1].register_forward_hook(_raises):
            step()
        segment = session._engine.segment
        step().backward()
        assert segment.outcome is Outcome.RAISED
        assert session._engine.segment.number == segment.number + 1


def test_a_step_that_is_tried_again_while_the_error_is_held_is_a_new_one_and_follows_the_plan() -> None:
    with swapping() as (model, step, _, session):
        hook = list(model.modules())[-1].register_forward_hook(_raises)
        try:
            step()
        except ValueError:
            hook.remove()
            step().backward()
    report = session.report()
    assert (report.total.steps, report.steps_followed, report.total.fallbacks) == (2, 1, 0)


def _raises(*_: object) -> None:
    raise ValueError("enough")


def test_a_forward_that_nobody_uses_is_an_unused_segment() -> None:
    model, batch, chooser = chain(), torch.ones(4, 8), InTurn()
    with under(chooser, model):
        model(batch)
        model(batch)
        model(batch)
    assert [segment.outcome for segment in chooser.ended] == [Outcome.UNUSED] * 3


def test_gradients_that_are_live_as_a_segment_begins_are_known() -> None:
    model, batch, chooser = chain(), torch.ones(4, 8), InTurn()
    with under(chooser, model):
        model(batch).backward()
        model(batch).backward()
    own_bytes = sum(p.nbytes for p in model.parameters())
    assert [segment.gradient_bytes for segment in chooser.chosen] == [0, own_bytes]


def test_a_chooser_may_wait_for_the_inputs_and_is_asked_again_when_the_model_is_called() -> None:
    model, chooser = chain(), InTurn(needs_inputs=True)
    with under(chooser, model):
        for rows in (4, 2):
            model(torch.ones(rows, 8)).backward()
    assert [segment.inputs for segment in chooser.chosen] == [("0 float32[4, 8]",), ("0 float32[2, 8]",)]


def test_a_chooser_has_to_say_at_the_first_save_also_before_the_model_is_called() -> None:
    model, chooser = chain(), InTurn(needs_inputs=True)
    scale = torch.ones(4, 8, requires_grad=True)
    with under(chooser, model):
        (model(scale.square()) * 1.0).backward()
    assert [segment.saves_next for segment in chooser.chosen] == [True]
    assert chooser.chosen[0].inputs is None


# -- the life of a saved value: only these transitions, and in each state only what it says ----------------------------


STATES = {
    ValueState.ON_DEVICE: {"is_copied": ValueState.COPIED, "is_dropped": ValueState.TO_REPLAY},
    ValueState.COPIED: {"is_released": ValueState.ON_HOST, "copy_has_failed": ValueState.ON_DEVICE},
    ValueState.ON_HOST: {"is_fetched": ValueState.ARRIVING},
    ValueState.ARRIVING: {"is_released": ValueState.ON_HOST},
    ValueState.TO_REPLAY: {"came_back": ValueState.ON_DEVICE},
}
"""Where each transition leads."""
ROADS = {
    ValueState.ON_DEVICE: [],
    ValueState.COPIED: ["is_copied"],
    ValueState.ON_HOST: ["is_copied", "is_released"],
    ValueState.ARRIVING: ["is_copied", "is_released", "is_fetched"],
    ValueState.TO_REPLAY: ["is_dropped"],
}
NAMES = ("is_copied", "is_released", "copy_has_failed", "is_fetched", "is_dropped", "came_back")
Transitions = dict[str, Callable[[], object]]


@contextlib.contextmanager
def alive(state: ValueState) -> Iterator[tuple[SavedValue, Transitions]]:
    """A value in that state and its transitions, with real copies and a real recipe."""
    with OpClock() as clock:
        device, tape, source = AdversarialDevice(clock), Tape("cpu"), torch.ones(16)
        recorder = Recorder(tape)
        recorder.switch_on()
        tensor = source * 2.0
        recorder.switch_off()
        storage = tensor.untyped_storage()
        value = SavedValue.of(Decision.SWAP, tape.record_of(tensor), tensor, None)
        recipe = Recipe(value.record, value.generation)

        def is_fetched() -> None:
            into = device.allocate(storage.nbytes())
            value.is_fetched(into, device.compute, copy_in(device, into, 0))

        given: dict[str, Callable[[], tuple[object, ...]]] = {
            "is_copied": lambda: (copy_out(device, storage, 0), 0),
            "is_dropped": lambda: (recipe,),
            "came_back": lambda: (storage,),
        }
        transitions: Transitions = {
            name: lambda name=name: getattr(value, name)(*given.get(name, tuple)())  # type: ignore[misc]
            for name in NAMES
        }
        transitions["is_fetched"] = is_fetched
        for name in ROADS[state]:
            transitions[name]()
        assert value.state is state
        yield value, transitions
        device.synchronize()


@pytest.mark.parametrize(("state", "name"), list(itertools.product(ValueState, NAMES)))
def test_a_value_goes_where_it_may_and_nowhere_else(state: ValueState, name: str) -> None:
    refused = pytest.raises(AssertionError, match="not a value that is")
    with alive(state) as (value, transitions):
        with contextlib.nullcontext() if name in STATES[state] else refused:
            transitions[name]()
        assert value.state is STATES[state].get(name, state)


@pytest.mark.parametrize("state", ValueState)
def test_a_value_has_a_storage_where_its_state_says_so(state: ValueState) -> None:
    on_host = state in (ValueState.COPIED, ValueState.ON_HOST, ValueState.ARRIVING)
    with alive(state) as (value, _):
        assert (value.storage is not None) == (state not in (ValueState.ON_HOST, ValueState.TO_REPLAY))
        assert (value.recipe is not None) == (state is ValueState.TO_REPLAY)
        assert (value.host_offset >= 0) == on_host


def test_what_arrives_is_on_the_device_and_still_on_the_host() -> None:
    with alive(ValueState.ARRIVING) as (value, _):
        value.arrived()
        assert value.state is ValueState.COPIED
        assert value.in_copy is None


def test_a_replay_that_gives_other_bytes_than_were_saved_is_an_error() -> None:
    with alive(ValueState.TO_REPLAY) as (value, _):
        with pytest.raises(RuntimeError, match="recomputing gave 4 bytes, 64 were saved"):
            value.came_back(torch.ones(1).untyped_storage())
        assert value.waits_for_replay

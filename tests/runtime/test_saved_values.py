"""The life of a saved value: only these transitions, and in each state only what it says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from poochplan.formats.plan import Decision
from poochplan.runtime.devices.transfers import copy_in, copy_out
from poochplan.runtime.engine.saved_value import SavedValue, ValueState
from poochplan.runtime.replays.replay import Recipe
from poochplan.runtime.replays.tape import Recorder, Tape
from tests.runtime.adversarial import AdversarialDevice, OpClock

pytestmark = pytest.mark.cpu_device
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

"""The life of a saved value: only these transitions, and in each state only what it says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from poochplan.formats.plan import Decision
from poochplan.runtime.devices.transfers import Copy, copy_in, copy_out
from poochplan.runtime.engine.saved_value import SavedValue, ValueState
from poochplan.runtime.replays.replay import Recipe
from poochplan.runtime.replays.tape import Recorder, Tape
from tests.runtime.adversarial import AdversarialDevice, OpClock

pytestmark = pytest.mark.cpu_device


class Life:
    """A value that can be told each transition, with real copies and a real recipe."""

    def __init__(self, clock: OpClock) -> None:
        self.device = AdversarialDevice(clock)
        self.tape = Tape("cpu")
        recorder = Recorder(self.tape)
        source = torch.ones(16)
        recorder.switch_on()
        tensor = source * 2.0
        recorder.switch_off()
        self.source = source
        self.value = SavedValue.of(Decision.SWAP, self.tape.record_of(tensor), tensor, None)
        self.recipe = Recipe(self.value.record, self.value.generation)
        self.storage = tensor.untyped_storage()

    def transitions(self) -> dict[str, Callable[[], object]]:
        value = self.value
        return {
            "is copied": lambda: value.is_copied(self._out(), 0),
            "is given up": value.is_released,
            "its copy has failed": value.copy_has_failed,
            "is fetched": lambda: value.is_fetched(*self._fetched()),
            "is dropped": lambda: value.is_dropped(self.recipe),
            "came back": lambda: value.came_back(self.storage),
        }

    def _out(self) -> Copy:
        return copy_out(self.device, self.storage, 0)

    def _fetched(self) -> tuple[torch.UntypedStorage, object, Copy]:
        storage = self.device.allocate(self.storage.nbytes())
        return storage, self.device.compute, copy_in(self.device, storage, 0)

    def do(self, name: str) -> None:
        self.transitions()[name]()


ROADS = {
    ValueState.ON_DEVICE: [],
    ValueState.COPIED: ["is copied"],
    ValueState.ON_HOST: ["is copied", "is given up"],
    ValueState.ARRIVING: ["is copied", "is given up", "is fetched"],
    ValueState.TO_REPLAY: ["is dropped"],
}
LEADS_TO = {
    (ValueState.ON_DEVICE, "is copied"): ValueState.COPIED,
    (ValueState.ON_DEVICE, "is dropped"): ValueState.TO_REPLAY,
    (ValueState.COPIED, "is given up"): ValueState.ON_HOST,
    (ValueState.COPIED, "its copy has failed"): ValueState.ON_DEVICE,
    (ValueState.ON_HOST, "is fetched"): ValueState.ARRIVING,
    (ValueState.ARRIVING, "is given up"): ValueState.ON_HOST,
    (ValueState.TO_REPLAY, "came back"): ValueState.ON_DEVICE,
}
NAMES = ("is copied", "is given up", "its copy has failed", "is fetched", "is dropped", "came back")


@contextlib.contextmanager
def alive(state: ValueState) -> Iterator[Life]:
    with OpClock() as clock:
        life = Life(clock)
        for step in ROADS[state]:
            life.do(step)
        yield life
        life.device.synchronize()


@pytest.mark.parametrize(("state", "name"), list(itertools.product(ValueState, NAMES)))
def test_a_value_goes_where_it_may_and_nowhere_else(state: ValueState, name: str) -> None:
    with alive(state) as life:
        assert life.value.state is state
        wanted = LEADS_TO.get((state, name))
        if wanted is None:
            with pytest.raises(AssertionError, match="not a value that is"):
                life.do(name)
            assert life.value.state is state
        else:
            life.do(name)
            assert life.value.state is wanted


@pytest.mark.parametrize("state", ValueState)
def test_a_value_has_a_storage_where_its_state_says_so(state: ValueState) -> None:
    with alive(state) as life:
        there = state in (ValueState.ON_DEVICE, ValueState.COPIED, ValueState.ARRIVING)
        assert (life.value.storage is not None) == there
        assert (life.value.recipe is not None) == (state is ValueState.TO_REPLAY)
        assert (life.value.host_offset >= 0) == (state in (ValueState.COPIED, ValueState.ON_HOST, ValueState.ARRIVING))


def test_what_arrives_is_on_the_device_and_still_on_the_host() -> None:
    with alive(ValueState.ARRIVING) as life:
        life.value.arrived()
        assert life.value.state is ValueState.COPIED
        assert life.value.in_copy is None


def test_a_replay_that_gives_other_bytes_than_were_saved_is_an_error() -> None:
    with alive(ValueState.TO_REPLAY) as life:
        with pytest.raises(RuntimeError, match="recomputing gave 4 bytes, 64 were saved"):
            life.value.came_back(torch.ones(1).untyped_storage())
        assert life.value.waits_for_replay

"""What only Python's garbage collector frees: the profile counts it to the end of the step, and says so."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

import poochplan
from poochplan.formats.profile import Profile
from poochplan.torch_private.tensor_internals import mode_count
from tests.live_bytes import peak_of_a_step
from tests.runtime.besides import HELD_BYTES, Cyclic, State, in_an_attribute, no_collector, nowhere, with_step
from tests.runtime.nets import LINK

NOTE = (
    "values that only Python's garbage collector frees: 1 (128 KiB), first act/relu in act; a training loop holds up "
    "to that much more than a plan's budget for each step since the last collection; break the reference cycle (a "
    "closure or an attribute that refers to itself), or call gc.collect() after each step"
)


def broken_up(model: Cyclic, state: State) -> None:
    """No cycle any more."""
    del state.own


def taken(model: Cyclic, **options: object) -> Profile:
    model, step, optimizer = with_step(model)
    return poochplan.profile(step, model=model, optimizer=optimizer, link=LINK, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [nowhere, in_an_attribute])
@pytest.mark.parametrize("mode", ["run", "swap-all", "auto", "fake"])
def test_a_note_names_what_a_cycle_keeps_until_the_collector_runs(
    keep: Callable[[Cyclic, State], object], mode: str
) -> None:
    options = {"roofline": "v100"} if mode == "fake" else {"iterations": 2}
    assert NOTE in taken(Cyclic(keep), mode=mode, **options).notes


def test_without_a_cycle_there_is_no_note() -> None:
    assert taken(Cyclic(broken_up), iterations=1).notes == ()


def test_what_a_cycle_holds_lives_to_the_end_of_the_step_and_is_kept_however_often_python_collects() -> None:
    often = gc.get_threshold()
    gc.set_threshold(1)
    try:
        profile = taken(Cyclic(nowhere), iterations=1)
    finally:
        gc.set_threshold(*often)
    relu = next(value for value in profile.values if value.name == "act/relu")
    assert relu.size_bytes == HELD_BYTES
    assert relu.forward_death == profile.tick_count - 1
    assert relu.pinned == "held by something other than autograd until backward uses it"
    assert NOTE in profile.notes


def test_the_peak_is_that_of_a_step_in_which_nothing_is_collected() -> None:
    profile = taken(Cyclic(nowhere), iterations=1)
    model, step, optimizer = with_step(Cyclic(nowhere))
    with no_collector():
        peak_bytes = peak_of_a_step(model, step, optimizer, before=gc.collect)
    # The profile rounds each storage up to 512 bytes, the meter does not.
    assert peak_bytes <= profile.in_core_peak_bytes <= peak_bytes + 512 * len(profile.values)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled: bool) -> None:
    def fails(model: Cyclic, state: State) -> None:
        if mode_count():  # the captured step
            raise KeyError("data")

    (gc.enable if enabled else gc.disable)()
    try:
        taken(Cyclic(), iterations=1)
        assert gc.isenabled() is enabled
        with pytest.raises(KeyError):
            taken(Cyclic(fails), iterations=1)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()

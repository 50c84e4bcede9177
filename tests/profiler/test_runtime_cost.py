"""The launching thread's costs are measured once for a process and device; those not distinguished from 0 are named."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.plan import Decision
from poochplan.formats.profile import RuntimeCost
from poochplan.planner.simulator.problem import Problem
from poochplan.profiler.assembly.assemble import runtime_notes
from poochplan.profiler.capture.clock import DeviceClock
from poochplan.profiler.live import own_costs
from poochplan.profiler.trials import machine_facts
from poochplan.profiler.trials.machine_facts import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    HookSeconds,
    Measured,
    cached_cost,
    costs_of,
    is_above_zero,
    measured_from,
    measured_on,
)
from tests.processes import python
from tests.runtime.nets import CASES, LINK

CPU = torch.device("cpu")
COSTS = ("handle_s", "swap_s", "record_s", "replay_s", "unpack_s", "fetch_s")


def _cost() -> RuntimeCost:
    measured = cached_cost(CPU)
    assert measured is not None
    return measured.cost


def test_a_profile_says_what_handles_swaps_recording_and_replays_cost() -> None:
    cost = CASES["residual"].profile().runtime
    for name in COSTS:
        seconds = getattr(cost, name)
        assert 0 < seconds < 1 or (seconds == 0 and name in cost.unmeasured)
    assert cost.unpack_s <= cost.handle_s
    assert cost.fetch_s <= cost.swap_s
    assert cost.launch_s == 0  # on the CPU it is in the duration of each op


def test_without_steps_that_fit_handles_cost_what_they_do_on_a_small_network() -> None:
    """Of profiles taken here: others of this process may have been taken with costs of another cache folder."""
    measured_apart = CASES["residual"].new_profile(mode="fake").runtime
    assert measured_apart == _cost()
    assert CASES["attention"].new_profile(mode="swap-all").runtime == measured_apart
    found = CASES["residual"].new_profile().runtime
    assert found.handle_s != measured_apart.handle_s
    assert found.unpack_s != measured_apart.unpack_s
    same = msgspec.structs.replace(found, handle_s=measured_apart.handle_s, unpack_s=measured_apart.unpack_s)
    assert same == measured_apart


def test_a_step_of_many_short_ops_has_costs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_costs, "LEAST_OPS", 50)
    monkeypatch.setattr(own_costs, "SHORT_OP_S", math.inf)
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    model, batch = torch.nn.Sequential(*layers), torch.randn(8, 16)
    found, apart = poochplan.profile(lambda: model(batch).sum(), model=model, link=LINK).runtime, _cost()
    timed = ("record_s", "replay_s", "swap_s", "fetch_s")
    own = {name for name in timed if getattr(found, name) != getattr(apart, name)}
    assert own, "a busy machine may hide some of them, and then they are the small network's"
    assert not own & {*found.unmeasured}
    assert found.fetch_s <= found.swap_s


def test_fetching_takes_no_more_than_swapping_whichever_of_them_could_be_measured() -> None:
    profile = CASES["residual"].profile()
    for own in ({"swap_s": 1e-9}, {"fetch_s": 1.0}, {"swap_s": 2.0, "fetch_s": 1.0}):
        cost = own_costs.with_own_costs(profile, own).runtime
        assert cost.fetch_s <= cost.swap_s
    assert own_costs.with_own_costs(profile, {}) is profile


def test_neither_these_nor_handles_are_timed_on_steps_that_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_costs, "LEAST_OPS", 1)
    monkeypatch.setattr(own_costs, "SHORT_OP_S", math.inf)
    linear, steps = torch.nn.Linear(4, 4), itertools.count()

    def step() -> torch.Tensor:  # each saves more than the one before
        batch = torch.ones(2, 4)
        for _ in range(1 + next(steps)):
            batch = torch.tanh(linear(batch))
        return batch.sum()

    assert poochplan.profile(step, model=linear, iterations=2, link=LINK).runtime == _cost()


def test_a_step_of_a_device_that_is_not_there_has_none() -> None:
    assert CASES["residual"].profile(mode="fake", roofline="v100").runtime is None


def test_without_a_disk_to_swap_to_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIR", str(tmp_path / "missing"))
    assert measured_on.__wrapped__(CPU, "") is None


def test_the_small_networks_run_on_one_thread_for_a_second_one_may_have_to_wait() -> None:
    code = """
    import time, torch
    from poochplan.profiler.trials.machine_facts import LAYERS, ROWS, _Network

    def by_others():
        return time.process_time() - time.thread_time()

    network = _Network(LAYERS, ROWS, torch.device("cpu"))
    network.step(None)
    time.sleep(0.5)  # a thread that has begun may still spin
    before_s = by_others()
    for _ in range(100):
        network.step(None)
    print(by_others() - before_s)
    """
    assert float(python(code, is_fresh=True, OMP_NUM_THREADS="2")) < 0.035  # seconds


# -- differences of noisy steps --------------------------------------------------------------------


def test_seven_samples_above_zero_are_told_from_it_and_five_are_not() -> None:
    assert is_above_zero([1e-9] * LEAST_ROUNDS)
    assert not is_above_zero([1.0] * 5)
    assert not is_above_zero([1.0] * 7 + [-1.0] * 2)
    assert is_above_zero([1.0] * 15 + [-1.0] * 2)
    assert not is_above_zero([0.0] * MOST_ROUNDS)


def noisy(mean: float, seed: int) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield rng.gauss(mean, 1.0)


def test_rounds_are_added_until_every_cost_is_told_from_zero() -> None:
    for seed in range(20):
        clear, faint = noisy(20.0, seed), noisy(1.5, seed)
        taken: list[float] = []

        def a_round() -> dict[str, float]:
            taken.append(next(faint))  # noqa: B023
            return {"clear": next(clear), "faint": taken[-1]}  # noqa: B023

        found, untold = costs_of(a_round)
        assert untold == ()
        assert found["faint"] > 0
        assert is_above_zero(taken[1:])  # the first is thrown away
        assert LEAST_ROUNDS <= len(taken) - 1 <= MOST_ROUNDS


def test_what_no_round_tells_from_zero_is_named_and_not_guessed() -> None:
    rounds = itertools.count()
    found, untold = costs_of(lambda: {"there": 1.0, "lost": -1.0 if next(rounds) % 2 else 3.0})
    assert found == {"there": 1.0, "lost": 0.0}
    assert untold == ("lost",)
    assert next(rounds) == 1 + MOST_ROUNDS


def test_a_profile_notes_what_could_not_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = RuntimeCost(handle_s=1e-5, swap_s=0.0, record_s=1e-5, unmeasured=("swap_s",))
    assert runtime_notes(None) == runtime_notes(RuntimeCost(handle_s=1e-5, swap_s=1e-4, record_s=1e-5)) == []
    monkeypatch.setattr(machine_facts, "cached_cost", lambda where: Measured(cost, 0.0))
    linear = torch.nn.Linear(4, 4)
    profile = poochplan.profile(lambda: linear(torch.ones(2, 4)).sum(), model=linear, mode="fake", link=LINK)
    assert profile.runtime is cost
    assert profile.notes[-1] == runtime_notes(cost)[0]
    assert "swap_s could not be distinguished from 0" in profile.notes[-1]


def test_what_is_unmeasured_is_in_the_cost_and_what_unpacking_takes_is_no_more_than_the_handle() -> None:
    names = ("launch_s", "call_s", *COSTS)
    found = dict.fromkeys(names, 2.0) | {"unpack_s": 3.0, "call_s": 0.0, "swap_s": 0.0}
    measured = measured_from(found, ("call_s", "swap_s"), "cpu")
    assert measured.cost.unmeasured == ("swap_s",)
    assert (measured.cost.unpack_s, measured.cost.fetch_s, measured.cost.launch_s) == (2.0, 0.0, 0.0)
    assert measured_from(found, (), "cuda").cost.launch_s == 2.0


def test_hooks_are_timed_also_where_they_raise() -> None:
    seconds = HookSeconds()

    def busy(argument: int) -> int:
        until_s = time.thread_time() + 1e-4
        while time.thread_time() < until_s:
            pass
        if argument < 0:
            raise ValueError("negative")
        return argument + 1

    assert seconds.timed("pack_s", busy)(1) == 2
    assert seconds.pack_s >= 1e-4
    assert seconds.unpack_s == 0
    with pytest.raises(ValueError, match="negative"):
        seconds.timed("unpack_s", busy)(-1)
    assert seconds.unpack_s >= 1e-4
    assert seconds.total_s == seconds.pack_s + seconds.unpack_s


# -- as on CUDA, where the device works behind the thread -------------------------------------------


def test_a_step_behind_which_a_device_works_begins_when_that_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines, with CPU tensors and the one name of ``torch.cuda`` that they call."""
    synchronized: list[torch.device] = []
    network = machine_facts._Network(4, 1, CPU)
    network.where = torch.device("cuda", 0)
    network._clock = DeviceClock(network.where)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    seconds = network.step(None)
    assert synchronized == [network.where]
    assert seconds.whole_s > 0
    assert seconds.forward_s > 0


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_every_other_value_of_the_small_network_is_replayed_and_none_falls_back() -> None:
    network = machine_facts._Network(6, 1, CPU)
    replays = Problem.of(network.profile).replay.replays
    replayed = [replays[value] for value, one in enumerate(network.every_other) if one is Decision.RECOMPUTE]
    assert sum(len(replay.ops) for replay in replayed if replay is not None) == network.replayed_op_count
    assert all(source % 2 == 0 for replay in replayed if replay is not None for source in replay.inputs)
    with machine_facts._planned(network, network.every_other, True) as recomputed:
        assert recomputed().unpack_s > 0


def test_measuring_leaves_no_network_behind_and_the_number_of_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = weakref.WeakSet[machine_facts.Chain]()
    make = machine_facts.Chain.__init__

    def seen(self: machine_facts.Chain, layers: int) -> None:
        make(self, layers)
        networks.add(self)

    def set_to(threads: int) -> None:
        raise AssertionError(f"threads were set to {threads}, which decides the bits of later products")

    monkeypatch.setattr(machine_facts.Chain, "__init__", seen)
    monkeypatch.setattr(torch, "set_num_threads", set_to)
    gc.disable()  # a loop's steps come before Python would collect
    try:
        assert measured_on.__wrapped__(CPU, "") is not None
        assert not len(networks)
    finally:
        gc.enable()

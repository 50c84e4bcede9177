"""Runs of one script that differ in a switch: each finds its own plan again, and takes none of another's."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from poochplan.online.plan_cache import scales_gradients
from poochplan.profiler.live import loop_observer
from poochplan.tensors.signatures import model_switches
from tests.online.runs import TURNS, opened, run_auto, run_plain
from tests.online.trainings import Training, accumulation, autocast, blocks, compiled_blocks, plain

Around = Callable[[], AbstractContextManager[None]]


def in_single() -> Training:
    return plain(blocks())


@contextlib.contextmanager
def switched(get: Callable[[], Any], switch: Callable[[Any], None], to: Any) -> Iterator[None]:
    before = get()
    switch(to)
    try:
        yield
    finally:
        switch(before)


precision = partial(switched, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
threads = partial(switched, torch.get_num_threads, torch.set_num_threads)

OTHERS: dict[str, tuple[Callable[[], Training], Around]] = {
    "autocast": (autocast, contextlib.nullcontext),
    "accumulation": (accumulation, contextlib.nullcontext),
    "compiled_parts": (compiled_blocks, contextlib.nullcontext),
    "precision": (in_single, lambda: precision("high")),
    "threads": (in_single, lambda: threads(2)),
}


def takes_its_own_plan(make: Callable[[], Training], cache: Path, turns: int = 4) -> bool:
    """Whether a run follows a plan from its first step on, to the last: nothing is studied, and no step leaves it."""
    run = run_auto(make, "60%", cache, turns)
    assert run.equals(run_plain(make, turns))
    found = run.planned_at == 0 and not run.session._source.loop.kinds and not run.session.total.fallbacks
    del run
    gc.collect()  # what this run has left is not to live beside the next one
    return found


@pytest.mark.parametrize("other", OTHERS)
def test_two_kinds_of_run_keep_their_plans_beside_each_other(other: str, tmp_path: Path) -> None:
    make, around = OTHERS[other]
    for turns in (TURNS, 4):
        is_second = turns < TURNS
        assert takes_its_own_plan(in_single, tmp_path, turns) is is_second
        with around():
            assert takes_its_own_plan(make, tmp_path, turns) is is_second


def test_two_kinds_of_step_in_one_run_follow_their_own_plans(tmp_path: Path) -> None:
    """One in single precision comes first; those in 16 bits do not follow its plan."""

    def both() -> Training:
        is_second = lambda number: number > 10 and number % 2 == 1  # noqa: E731
        return plain(blocks(), lambda number: torch.autocast("cpu", torch.bfloat16, enabled=is_second(number)))

    training = both()
    with opened(training, tmp_path) as session:
        for number in range(60):
            training.turn(number)
            if number in (12, 50):
                session.wait_until_planned(120)
        assert {key.switches.split()[0] for key in session.plans} == {"autocast=off+off", "autocast=bfloat16+off"}
        assert session.total.fallbacks == 0
    del training, session
    gc.collect()
    assert takes_its_own_plan(both, tmp_path, 16)


def test_what_no_fingerprint_tells_is_found_by_leaving_a_plan_and_no_run_deletes_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_observer, "model_switches", lambda _: "")
    plans = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # steps leave the other run's plan
        for make in (in_single, autocast):
            takes_its_own_plan(make, tmp_path, 30)
            plans.append({path: path.read_bytes() for path in sorted(tmp_path.rglob("*.json"))})
        run = run_auto(in_single, "60%", tmp_path, 8)
    assert run.session._source.loop.kinds == {}
    assert run.session.total.fallbacks == 2
    assert run.session.report().steps_followed == 8 - 2  # two have left the plan that they had begun under
    assert len(plans[0]) == 2
    assert len(plans[1]) == 4
    assert all(plans[1][path] == content for path, content in plans[0].items())


# -- what a fingerprint tells ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: precision("medium"),
        lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True),
        lambda: torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
)
def test_each_switch_of_torch_tells_kinds_of_step_apart(around: Around) -> None:
    model = torch.nn.Linear(2, 2)
    before = model_switches(model)
    with around():
        inside = model_switches(model)
    assert inside != before == model_switches(model)


def test_modes_frozen_parameters_and_new_layers_tell_kinds_of_step_apart_and_layers_that_go_are_not_held() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    found, head = [model_switches(model)], weakref.ref(model[1])
    model[1].eval()
    found.append(model_switches(model))
    model[1].bias.requires_grad_(False)
    found.append(model_switches(model))
    model[1] = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    found.append(model_switches(model))
    model[1][1].weight.requires_grad_(False)
    assert len({*found, model_switches(model)}) == 5
    assert head() is None


def test_a_gradient_scaler_makes_another_run() -> None:
    gc.collect()
    assert not scales_gradients()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert not scales_gradients()
    scaler = torch.amp.GradScaler("cpu")
    assert scales_gradients()
    del scaler

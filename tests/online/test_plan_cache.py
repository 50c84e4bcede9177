"""Which plans of earlier runs a loop finds again, and what a loop leaves that ended before its plan was made."""

from __future__ import annotations

import gc
import importlib
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.files import encode_readable
from poochplan.online.plan_cache import code_digest, switches_digest
from tests.online.runs import Run, opened, planning, run_auto, run_plain
from tests.online.trainings import Training, blocks, dropout_and_batch_norm, stepping
from tests.runtime.besides import no_collector

MODEL = """
from torch import nn

class Model(nn.Linear):
    def forward(self, batch):
        return super().forward(batch).{}()
"""


def test_a_model_whose_code_has_changed_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan's replays were tried with the code of then."""
    file = tmp_path / "code_that_changes.py"
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text(MODEL.format("relu"))
    model = importlib.import_module("code_that_changes").Model(2, 2)
    before = code_digest(model)
    assert code_digest(model) == before
    file.write_text(MODEL.format("tanh"))
    assert code_digest(model) != before


def test_a_switch_a_backend_and_a_replaced_or_wrapped_call_make_another_model_and_its_mode_does_not() -> None:
    """As accelerate wraps a model's forward."""

    def digest_of(change: Callable[[torch.nn.Module], object]) -> str:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
        found = change(model)
        return switches_digest(found if isinstance(found, torch.nn.Module) else model)

    def wrapped(dtype: torch.dtype) -> Callable[[torch.nn.Module], object]:
        return lambda model: setattr(model, "forward", torch.autocast("cpu", dtype)(model.forward))

    changes: list[Callable[[torch.nn.Module], object]] = [
        lambda model: model.eval(),
        lambda model: setattr(model[0], "gradient_checkpointing", True),
        lambda model: setattr(model[1], "p", 0.2),
        lambda model: model[0].compile(backend="eager"),
        lambda model: model[0].compile(backend="aot_eager"),
        lambda model: setattr(model, "0", torch.compile(model[0], backend="eager")),
        torch.compile,
        lambda model: setattr(model[0], "forward", torch.nn.functional.relu),
        wrapped(torch.bfloat16),
        wrapped(torch.float16),
    ]
    first, second = ([digest_of(change) for change in changes] for _ in range(2))
    assert first == second
    assert first[0] == digest_of(lambda _: None)
    assert len(set(first)) == len(changes)


def budget_of(expected: Run) -> int:
    return int(expected.peak_bytes * 0.6)


@pytest.fixture(scope="module")
def first(expected: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a run that has planned."""
    cache = tmp_path_factory.mktemp("cache")
    run_auto(dropout_and_batch_norm, budget_of(expected), cache)
    gc.collect()
    return cache


def again(expected: Run, cache: Path, **options: Any) -> Run:
    gc.collect()
    return run_auto(dropout_and_batch_norm, budget_of(expected), cache, **options)


def test_the_second_run_follows_from_its_second_step_on_with_equal_bits_and_collects_nothing(
    expected: Run, first: Path, calls: Counter[str]
) -> None:
    found = again(expected, first)
    assert calls["get_objects"] <= 4
    assert calls["collect"] == 0
    assert found.equals(expected)
    assert found.planned_at == 0
    assert found.session.total.fallbacks == 0
    assert found.session._source.loop.kinds == {}
    assert found.peak_bytes <= budget_of(expected)


def test_what_has_come_to_live_beside_the_step_since_is_planned_for(expected: Run, first: Path, tmp_path: Path) -> None:
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    beside = torch.zeros(int(expected.peak_bytes * 0.04 / 4))
    (place,) = {path.parent for path in tmp_path.rglob("plan.json")}
    found = again(expected, tmp_path, before_plan="swap")
    del beside
    assert found.equals(expected)
    assert found.session.plan is not None
    assert found.peak_bytes <= budget_of(expected)
    assert poochplan.Plan.load(place / "plan.json").prediction.peak_bytes <= budget_of(expected)
    assert found.session._source.loop.kinds == {}


def test_a_plan_that_ends_a_run_by_an_error_is_not_the_first_that_the_next_run_tries(
    expected: Run, first: Path, tmp_path: Path
) -> None:
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    (kept,) = tmp_path.rglob("profile.json")
    before_s = kept.stat().st_mtime
    beside = torch.zeros(int(expected.peak_bytes * 0.5 / 4))
    with pytest.raises(poochplan.BudgetExceededError):
        again(expected, tmp_path, on_over_budget="error")
    del beside
    assert kept.stat().st_mtime == before_s


@pytest.mark.parametrize("damage", ["truncated", "of another model"])
def test_a_cache_that_is_damaged_is_as_good_as_none(damage: str, expected: Run, first: Path, tmp_path: Path) -> None:
    entry = next(path.parent for path in first.rglob("plan.json"))
    place = shutil.copytree(entry, tmp_path / entry.name) / "plan.json"
    plan = poochplan.Plan.load(place)
    other = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, fingerprint="other"))
    content = {"truncated": place.read_bytes()[:1000], "of another model": encode_readable(other)}
    place.write_bytes(content[damage])
    found = again(expected, tmp_path, turns=12, before_plan="swap")
    assert found.losses == expected.losses[:12]
    assert found.session.total.fallbacks == 0
    assert found.peak_bytes <= budget_of(expected)


@pytest.mark.parametrize("changed", ["code_digest", "switches_digest"])
def test_a_run_of_other_code_or_switches_takes_no_plan_of_an_earlier_one(
    changed: str, expected: Run, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert again(expected, first, turns=3).planned_at == 0
    monkeypatch.setattr(f"poochplan.online.plan_cache.{changed}", lambda _: "other")
    assert again(expected, first, turns=3).planned_at is None


def test_what_waits_for_the_collector_is_no_reason_for_another_plan(
    expected: Run, first: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    gc.collect()
    training = dropout_and_batch_norm()
    with no_collector(), opened(training, first, budget=budget_of(expected), quiet=False) as session:
        held = [torch.ones(1 << 20)]
        held.append(held)
        del held
        calls.clear()
        for number in range(3):
            training.turn(number)
        assert session.report().steps_followed == 3
        assert calls["collect"] == 1
    assert "another" not in capsys.readouterr().err


def micro_batches() -> Training:
    """Four to a step: the last three are alike."""
    model, data = blocks(4), torch.randn(256, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepping(model, lambda _: (model(data).square().mean() for _ in range(4)), optimizer)


def test_micro_batches_that_were_found_alike_are_not_profiled_again_in_the_next_run(tmp_path: Path) -> None:
    first = run_auto(micro_batches, "75%", tmp_path).losses
    gc.collect()  # what that run has left is not to live beside the next one
    second = run_auto(micro_batches, "75%", tmp_path, turns=4)
    assert second.losses == first[:4] == run_plain(micro_batches, 4).losses
    assert second.session._source.loop.kinds == {}
    assert second.session.report().steps_followed >= 15


def test_a_loop_that_ends_while_it_is_planned_says_so_and_the_next_run_goes_on_from_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planning(dropout_and_batch_norm(), tmp_path, quiet=False, time_limit_s=60).close()
    said = capsys.readouterr().err
    found = run_auto(dropout_and_batch_norm, "60%", tmp_path)
    assert "the loop has ended while a plan was being made" in said
    assert found.session.plan is not None
    assert found.session._source.loop.kinds == {}
    assert found.equals(run_plain(dropout_and_batch_norm))


def test_a_loop_of_few_steps_says_that_nothing_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_auto(dropout_and_batch_norm, "60%", tmp_path, turns=3, quiet=False)
    assert "the loop has ended before it was profiled" in capsys.readouterr().err

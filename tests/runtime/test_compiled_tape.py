"""The compiled tape sees what runs, holds no memory, and stands back where it cannot serve."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from poochplan import guard
from poochplan.errors import NativeError
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import simulate
from poochplan.runtime.replays import compiled_tape
from poochplan.runtime.replays.compiled_tape import LEAST_BYTES, TAPE, CompiledRecorder, build_beside, recording
from poochplan.runtime.replays.replay import OFF, NotReplayable
from poochplan.runtime.replays.tape import Recorder
from tests.planner.plans import plan_with
from tests.runtime.nets import CASES, Case, equal, in_core, our_warnings, train
from tests.runtime.random_plans import random_plan
from tests.runtime.tapes import COMPILED
from tests.runtime.third_party_networks import NETWORKS, random_schedule

pytestmark = [pytest.mark.cpu_device, pytest.mark.parametrize("tape", [COMPILED], indirect=True)]


@pytest.fixture
def recorder(tape: str) -> Iterator[Any]:
    """One that is on, behind the op in which that was asked for."""
    on_it, found = recording("cpu")
    assert isinstance(found, CompiledRecorder)
    assert not on_it.buffers
    found.switch_on()
    torch.ones(1).neg()
    yield found
    found.switch_off()


def names(recorder: Any) -> list[str]:
    found: list[str] = []
    recorder.tape.listener = lambda name, overload: found.append(name)
    return found


def test_it_sees_each_op_below_autograd_and_no_view(recorder: Any) -> None:
    found = names(recorder)
    weight = torch.ones(4, 4, requires_grad=True)
    (torch.nn.functional.linear(torch.ones(2, 4), weight).view(-1) * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert [name for name in found if "ones" not in name][:3] == ["aten::mm", "aten::mul", "aten::sum"]


def test_a_tensor_that_it_has_seen_dies_as_if_it_had_not(recorder: Any) -> None:
    storage = torch.ones(64).mul(3).untyped_storage()
    dead = weakref.ref(storage)
    assert recorder.tape.known(storage) is not None
    del storage
    assert dead() is None


def test_what_comes_from_an_index_that_is_left_out_in_part_can_be_made_again(recorder: Any) -> None:
    rows, index = torch.ones(2, 4, 3, 8), torch.zeros(1, dtype=torch.int64)
    picked = rows[:, :, index]
    made = picked * 2
    del picked
    record = recorder.tape.known(made.untyped_storage())
    assert recorder.tape.recipe(record, record.generation) is not None


def test_a_network_that_picks_its_heads_by_an_index_takes_what_is_promised() -> None:
    case = NETWORKS["falcon"]
    problem = Problem.of(case.profile())
    schedule = random_schedule(case.profile(), problem, 0)
    found, report = train(case, 3, plan_with(case.profile(), schedule), meter="always")
    assert equal(found, in_core(case, 3))
    assert report is not None
    assert report.last_step.replayed_values > 0
    assert report.total.peak_bytes == simulate(problem, schedule).peak_bytes


def test_an_op_that_raises_passes_and_recording_goes_on(recorder: Any) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        torch.ones(3) + torch.ones(4)
    found = names(recorder)
    torch.ones(3).exp()
    assert "aten::exp" in found


def test_an_op_that_draws_and_raises_leaves_nothing(recorder: Any) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.ones(3).bernoulli_(2.0)
    assert recorder.is_on


def test_what_of_ours_raises_in_an_op_ends_recording_and_not_the_op(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("asked to")

    monkeypatch.setattr(compiled_tape._HELPERS, "facts", fails)
    assert torch.ones(2).erfinv().isinf().all()
    with pytest.raises(RuntimeError, match="asked to"):
        recorder.switch_off()


def test_a_session_whose_recording_fails_stands_aside_and_trains_as_in_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("asked to")

    case: Case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (0, 0, 1))
    monkeypatch.setattr(guard, "RAISES", False)
    monkeypatch.setattr(compiled_tape._HELPERS, "switch_state", fails)
    torch.use_deterministic_algorithms(True, warn_only=True)  # so that switches are as no tape has seen them
    try:
        with our_warnings() as said:
            found, _ = train(case, 2, plan)
        assert equal(found, in_core(case, 2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert ["asked to" in line for line in said if "the session stands aside" in line] == [True]


def test_a_generator_is_set_back_behind_a_replay_though_that_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, set_state_of = list[None](), compiled_tape._HELPERS.set_state_of

    def fails_at_the_second(*given: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyError("asked to")
        set_state_of(*given)

    case: Case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (0, 0, 1))
    monkeypatch.setattr(guard, "RAISES", False)
    monkeypatch.setattr(compiled_tape._HELPERS, "set_state_of", fails_at_the_second)
    with our_warnings() as said:
        found, _ = train(case, 3, plan)
    assert len(calls) > 2
    assert equal(found, in_core(case, 3))
    assert ["asked to" in line for line in said if "the session stands aside" in line] == [True]


@pytest.mark.parametrize("usable", [True, False])
def test_a_content_has_a_recipe_if_all_its_writers_can_run_again(recorder: Any, usable: bool) -> None:
    made = torch.ones(4).exp() if usable else torch.ones(4).to_sparse().to_dense()
    record = recorder.tape.record_of(made)
    if usable:
        recorder.tape.recipe(record, record.generation)
        return
    with pytest.raises(NotReplayable):
        recorder.tape.recipe(record, record.generation)


def test_no_content_has_a_recipe_once_recording_has_failed(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.ones(4).exp()
    record = recorder.tape.record_of(made)
    monkeypatch.setattr(compiled_tape._HELPERS, "facts", lambda *_: [][0])
    torch.ones(2).igamma(torch.ones(2))
    assert recorder.window == OFF
    with pytest.raises(RuntimeError):
        recorder.tape.recipe(record, record.generation)
    recorder.switch_off()  # it is told once


def test_an_operator_with_functions_as_arguments_runs_as_without_recording(recorder: Any) -> None:
    rows = torch.linspace(-1, 1, 8).requires_grad_()
    found = torch.cond(rows.sum() > 1, lambda one: one.sin(), lambda one: one.cos() * 2, (rows,))
    assert found.equal(rows.cos() * 2)


def test_what_another_thread_runs_is_not_recorded_and_does_not_pause_recording(recorder: Any) -> None:
    found = names(recorder)

    def beside() -> None:
        recorder.tape.is_paused = True
        torch.ones(3).sinh()

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    torch.ones(3).cosh()
    assert "aten::cosh" in found
    assert "aten::sinh" not in found


TAKES = {
    "fallback": "taken = Library('_', 'IMPL', 'Fake'); taken.fallback(torch.library.fallthrough_kernel)",
    "operator": "taken = Library('aten', 'IMPL'); taken.impl('sinh', torch.Tensor.cosh, 'Fake')",
}
_STANDS_BACK = """
import torch
from torch.library import Library
{takes}
from poochplan.runtime.replays.compiled_tape import recording
print([type(recording("cpu")[1]).__name__ for _ in range(2)])
"""


@pytest.mark.parametrize("how", TAKES)
def test_it_stands_back_and_says_so_once_if_another_library_has_the_key(how: str) -> None:
    code = _STANDS_BACK.format(takes=TAKES[how])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str([Recorder.__name__] * 2), done.stderr
    assert done.stderr.count("another library uses torch's dispatch key Fake") == 1


def test_it_is_not_built_for_a_torch_whose_key_comes_before_users_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = Path(torch.__file__).parent
    for part in ("include/c10/core/DispatchKey.h", "include/c10/core/Allocator.h"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).write_text((headers / part).read_text())
    (tmp_path / "lib").symlink_to(headers / "lib")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    header = tmp_path / "include/c10/core/DispatchKey.h"
    assert TAPE.options()
    header.write_text(header.read_text().replace("\n  Fake,", "").replace("\n  Python,", "\n  Python,\n\n  Fake,"))
    with pytest.raises(NativeError, match=r"expected torch 2\.13 or newer"):
        TAPE.options()


@pytest.mark.parametrize(("owner", "name", "value"), [(TAPE, "is_built", bool), (compiled_tape, "IS_WANTED", False)])
def test_the_tape_of_python_serves_where_it_is_not_built_or_not_wanted(
    owner: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(recording("cpu")[1]) is CompiledRecorder
    assert type(recording("cpu", has_compiled=True)[1]) is Recorder
    monkeypatch.setattr(owner, name, value)
    assert type(recording("cpu")[1]) is Recorder


@pytest.mark.parametrize("is_built", [True, False])
def test_it_is_built_beside_the_first_session_that_recomputes(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, begun = CASES["residual"], list[bool]()
    plans = [random_plan(case.profile(), 0, weights) for weights in ((0, 1, 0), (0, 0, 1))]
    monkeypatch.setattr(compiled_tape, "build_beside", lambda: begun.append(True))
    if not is_built:
        monkeypatch.setattr(TAPE, "is_built", bool)
    begins = []
    for plan in plans:
        train(case, 2, plan)
        begins.append(bool(begun))
    assert begins == [False, not is_built]


@pytest.mark.parametrize(("left_bytes", "is_begun"), [(LEAST_BYTES, True), (LEAST_BYTES - 1, False)])
def test_it_is_not_built_beside_a_loop_that_may_need_the_memory(
    left_bytes: int, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    monkeypatch.setattr(compiled_tape, "_build", begun.set)
    monkeypatch.setattr(compiled_tape, "available_bytes", lambda: left_bytes)
    monkeypatch.setattr(TAPE, "why_unavailable", str)
    monkeypatch.setattr(TAPE, "last_failure", str)
    build_beside.__wrapped__()
    assert begun.wait(5 if is_begun else 0.2) is is_begun


def test_what_is_between_hooks_and_not_of_the_step_is_not_recorded(recorder: Any) -> None:
    found = names(recorder)
    with compiled_tape.unrecorded():
        torch.ones(3).sinh()
    torch.ones(3).cosh()
    assert "aten::cosh" in found
    assert "aten::sinh" not in found

"""A session of ``auto``: its end, its cache, its planning process, and what it says of a budget that cannot be kept."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import poochplan
from poochplan.errors import InfeasibleError, UsageError
from poochplan.integrations.trainers import running_method
from poochplan.profiler.trials.machine_facts import is_complete
from poochplan.torch_private.hooks import has_topmost_hooks
from tests.forks import forked
from tests.online.caches import empty_cache
from tests.online.runs import Run, opened, planning, run_auto
from tests.online.trainings import Training, checkpointing_inside, dropout_and_batch_norm, stepping


def traces(model: torch.nn.Module) -> list[Any]:
    """What a session could leave on a model: attributes and hooks of each module."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_forward_hooks_always_called")
    return [
        (name, sorted(vars(module)), [list(getattr(module, hook)) for hook in hooks])
        for name, module in model.named_modules()
    ]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("turns", [5, 7, 9])
def test_a_loop_may_end_at_any_step_of_its_profile(turns: int, tmp_path: Path) -> None:
    gc.collect()
    run_auto(dropout_and_batch_norm, "60%", tmp_path, turns=turns)
    gc.collect()  # an error while a study is freed is printed, and raised nowhere


@contextmanager
def leaves_nothing_on(model: torch.nn.Module) -> Iterator[None]:
    before = traces(model)
    yield
    assert traces(model) == before
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_nothing_is_left_on_the_model_however_the_session_ends_or_where_entering_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = dropout_and_batch_norm()
    with leaves_nothing_on(training.model), pytest.raises(ZeroDivisionError), opened(training, tmp_path):
        training.turn(0)
        training.turn(1)
        raise ZeroDivisionError
    training.turn(2)
    monkeypatch.setattr("poochplan.online.auto.open_device", Mock(side_effect=OSError("no device")))
    with leaves_nothing_on(training.model), pytest.raises(OSError, match="no device"), opened(training, tmp_path):
        pass


def test_a_budget_that_cannot_be_kept_is_an_error_that_names_the_smallest(expected: Run, tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match=r"the smallest possible is \d+ bytes") as caught:
        run_auto(dropout_and_batch_norm, 1000, tmp_path, turns=12, on_over_budget="error")
    smallest_bytes = caught.value.smallest_budget_bytes
    assert 0 < smallest_bytes < expected.peak_bytes
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"budget": number}, f'found {number}; did you mean "{number}%"?') for number in (60, 2, 99.5)),
        *(({name: "never"}, f'{name}: expected "in-core" or "swap", found') for name in ("before_plan", "on_refusal")),
        *(({"arena": word}, 'arena: expected "auto", "on" or "off", found') for word in ("yes", "ON", "")),
        ({"on_over_budget": "raise"}, 'on_over_budget: expected "warn", "error" or "replan", found'),
    ],
)
def test_an_argument_that_means_nothing_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        poochplan.auto(torch.nn.Linear(2, 2), **{"budget": "60%", **options})
    assert "\n" not in str(error.value)


def test_what_keeps_the_smallest_budget_large_is_in_the_refusal(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="no plan fits .*; activation checkpointing is on"):
        run_auto(checkpointing_inside, 1000, tmp_path)


def children() -> list[int]:
    """Processes of this one that plan. One that has just begun has no command line yet: wait for it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            is_child = f"\nPPid:\t{os.getpid()}\n" in (process / "status").read_text()
            if is_child and "planning_process" in (process / "cmdline").read_text():
                found.append(int(process.name))
    return found


def within(seconds: float, holds: Callable[[], object]) -> object:
    end_s = time.monotonic() + seconds
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.05)
    return holds()


def test_the_planning_process_ends_with_the_session(tmp_path: Path) -> None:
    session = planning(dropout_and_batch_norm(), tmp_path, time_limit_s=60)
    assert within(10, children)
    (child,) = children()
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    most, lower = min(mine + 10, 19), min(mine + 1, 19)  # a share where all cores are busy
    assert within(10, lambda: lower <= os.getpriority(os.PRIO_PROCESS, child) <= most)
    session.close()
    assert within(10, lambda: not children())


PARENT = """
import os, sys, time
from pathlib import Path
from tests.online.runs import planning
from tests.online.test_sessions import children, within
from tests.online.trainings import dropout_and_batch_norm
session = planning(dropout_and_batch_norm(), Path(sys.argv[1]), time_limit_s=60)
assert within(10, children)
print(os.getpid(), children()[0], flush=True)
time.sleep(600)
"""


def test_the_planning_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    root, files = str(Path(__file__).parents[2]), tmp_path / "files"
    files.mkdir()
    command = [*forked(), "-c", PARENT, str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(files)}
    begun = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    parent, child = map(int, begun.stdout.readline().split())
    os.kill(child, signal.SIGSTOP)  # it is at its beginning
    assert list(files.glob("poochplan-*"))
    os.kill(parent, signal.SIGKILL)
    begun.wait()
    os.kill(child, signal.SIGCONT)
    assert within(30, lambda: is_gone(child))
    assert not list(files.glob("poochplan-*"))


def is_gone(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


class Owner:
    """As a trainer whose callback is told of its begin, and not of an end by an exception."""

    def train(self, training: Training, cache: Path) -> None:
        self.session = opened(training, cache)
        self.session.__enter__()
        self.session._lasts_while(running_method(Owner)[1])
        training.turn(0)
        training.turn(1)
        raise ValueError("in the middle")


def test_a_session_ends_where_the_call_that_it_was_for_has_raised(tmp_path: Path) -> None:
    training, other, owner = dropout_and_batch_norm(), dropout_and_batch_norm(), Owner()
    with leaves_nothing_on(training.model):
        with pytest.raises(ValueError, match="in the middle") as caught:  # the traceback holds the frame
            owner.train(training, tmp_path)
        segments = owner.session._engine.segment.number
        other.turn(0)
        assert caught.value.__traceback__ is not None
        assert owner.session._engine.segment.number == segments


def test_a_session_that_is_collected_in_the_middle_of_another_training_is_no_error(tmp_path: Path) -> None:
    """As one that only a traceback's cycle held. What a save means to it is found after a collection."""
    training, other = dropout_and_batch_norm(), dropout_and_batch_norm()
    cycle: list[Any] = [opened(training, tmp_path)]
    cycle[0].__enter__()
    for number in range(14):
        training.turn(number)
        cycle[0].wait_until_planned(0.0)
    engine = cycle[0]._engine
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        other.turn(0)
    finally:
        gc.enable()
    assert not engine.cursor.is_open
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_hooks_that_others_have_put_on_top_stay_where_a_session_ends_below_them(tmp_path: Path) -> None:
    training, other, owner = dropout_and_batch_norm(), dropout_and_batch_norm(), Owner()
    with pytest.raises(ValueError, match="in the middle"):
        owner.train(training, tmp_path)
    packed: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x) as hooks:
        other.turn(0)
        training.turn(2)
        assert packed
        assert has_topmost_hooks(hooks) if hooks is not None else True
    other.turn(1)
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_auto_is_the_same_for_a_step_of_many_micro_batches_as_for_one_of_two(tmp_path: Path) -> None:
    def many() -> Training:
        model, data = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()), torch.randn(256, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return stepping(model, lambda _: (model(data).square().mean() for _ in range(32)), optimizer, zeroes_last=True)

    assert len(run_auto(many, "95%", tmp_path, 3, is_metered=False).session._source.loop.kinds) == 2


def test_a_loop_that_fits_in_core_swaps_nothing_once_it_is_known_to(expected: Run, tmp_path: Path) -> None:
    """Neither while it is timed nor while its plan is made."""
    found = run_auto(dropout_and_batch_norm, 2 * expected.peak_bytes, tmp_path, turns=11)
    assert found.losses == expected.losses[:11]
    assert found.session._engine.segment.report.out_bytes == 0


def test_what_the_machine_takes_is_measured_by_the_process_that_plans(expected: Run, tmp_path: Path) -> None:
    with empty_cache(tmp_path / "user"):
        found = run_auto(dropout_and_batch_norm, int(expected.peak_bytes * 0.6), tmp_path, link=None)
    assert found.losses == expected.losses
    assert is_complete(found.session.profile)
    assert found.session.profile.link.name == "spill"
    (kept,) = (poochplan.Profile.load(path) for path in tmp_path.rglob("profile.json"))
    assert kept == found.session.profile

"""The compiled tape sees what runs, holds no memory, and stands back where it cannot serve."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from poochplan.runtime.replays import compiled_tape
from poochplan.runtime.replays.compiled_tape import TAPE, CompiledRecorder, recording
from poochplan.runtime.replays.replay import NotReplayable
from poochplan.runtime.replays.tape import Recorder

pytestmark = [
    pytest.mark.cpu_device,
    pytest.mark.skipif(bool(TAPE.why_unavailable()), reason=TAPE.why_unavailable()),
]


@pytest.fixture
def recorder() -> Iterator[Any]:
    """One that is on, behind the op in which that was asked for."""
    TAPE.build()
    tape, found = recording("cpu", is_compiled=True)
    assert isinstance(found, CompiledRecorder)
    assert not tape.buffers
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


@pytest.mark.parametrize("usable", [True, False])
def test_a_content_has_a_recipe_if_all_its_writers_can_run_again(recorder: Any, usable: bool) -> None:
    made = torch.ones(4).exp() if usable else torch.ones(4).to_sparse().to_dense()
    record = recorder.tape.record_of(made)
    if usable:
        recorder.tape.recipe(record, record.generation)
        return
    with pytest.raises(NotReplayable):
        recorder.tape.recipe(record, record.generation)


_OTHER = """
import torch
library = torch.library.Library("_", "IMPL", "Fake")
library.fallback(torch.library.fallthrough_kernel) if hasattr(library, "fallback") else library.impl
from poochplan.runtime.replays.compiled_tape import recording
print(type(recording("cpu", is_compiled=True)[1]).__name__)
"""


def test_it_stands_back_if_another_library_has_the_key() -> None:
    TAPE.build()
    done = subprocess.run([sys.executable, "-c", _OTHER], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == Recorder.__name__, done.stderr


def test_the_tape_of_python_serves_where_it_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TAPE, "is_built", lambda: False)
    assert type(recording("cpu", is_compiled=True)[1]) is Recorder

"""Which tape the sessions of a test record on: the one of Python, or the compiled one."""

from __future__ import annotations

import pytest

from poochplan.runtime.replays import compiled_tape
from poochplan.runtime.replays.compiled_tape import TAPE
from tests.depth import DAY, EVERYTHING

IN_TURN = {
    *("test_recording", "test_exactness", "test_replay_limits", "test_replay_kinds", "test_safety", "test_switches"),
    *("test_sources", "test_late_buffers", "test_autograd_steps", "test_users_modes", "test_third_party"),
    *("test_unusual_tensors", "test_backward_without_modes", "test_programs"),
}
"""Files whose tests run on one today and on the other tomorrow; on both with ``ALL=1``. All others have the compiled
one where it can be built.
"""
KINDS = PYTHON, COMPILED = "python", "compiled"


def on_tapes(metafunc: pytest.Metafunc) -> None:
    """A hook, for a conftest to import as ``pytest_generate_tests``."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in IN_TURN:
        metafunc.parametrize("tape", KINDS if EVERYTHING else [KINDS[DAY % 2]], indirect=True)


@pytest.fixture(autouse=True, name="tape")
def tape_of_sessions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of tape that sessions of the test record on."""
    kind: str = getattr(request, "param", COMPILED)
    monkeypatch.setattr(compiled_tape, "IS_WANTED", kind == COMPILED)
    if hasattr(request, "param") and kind == COMPILED and not TAPE.is_built():
        pytest.skip(TAPE.why_unavailable() or TAPE.last_failure())
    return kind

"""What tests of faults share: the network, its plans, and that nothing is left behind."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from poochplan.formats.plan import Plan
from poochplan.runtime.devices.transfers import Copy
from poochplan.runtime.engine.saved_value import SavedHandle
from tests.runtime.nets import CASES, equal, in_core, train
from tests.runtime.random_plans import random_plan

CASE = CASES["residual"]


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Also where pytest runs in the background of a script, which makes its processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """All three decisions."""
    return random_plan(CASE.profile(), 1)


@pytest.fixture(scope="module")
def swaps() -> Plan:
    """Every value that may be is swapped."""
    return random_plan(CASE.profile(), 0, (0, 1, 0))


@pytest.fixture
def leaves_nothing(plan: Plan) -> Iterator[None]:
    """No thread, file, handle, copy, hook or mode is there that was not before the test, and a new session works."""
    gc.collect()  # what other tests left in cycles would go during this one
    threads, files = set(threading.enumerate()), open_files()
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=10)  # one that was just told to end may still run
        assert not thread.is_alive()
    assert open_files() <= files
    assert not [thing for thing in gc.get_objects() if type(thing) in (SavedHandle, Copy)]
    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore[attr-defined]
    assert equal(in_core(CASE, 1), train(CASE, 1, plan)[0])


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))

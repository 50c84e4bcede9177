"""Every test of the runtime runs on two devices: the CPU's, and the adversarial one (``adversarial.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.depth import PART, is_of_rest, runs_on_two_devices
from tests.runtime.adversarial import AdversarialDevice, OpClock
from tests.runtime.tapes import on_tapes, tape_of_sessions


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The test on the CPU device, and once more on the adversarial one: with the same fixtures, from the same seed.

    The first part of the suite has the adversarial one alone, which is the stricter. The rest has the other, by day for
    some files (``tests/depth.py``).
    """
    if not runs_on_two_devices(pyfuncitem):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    on_both = not PART or is_of_rest(pyfuncitem)
    if on_both or PART == "rest":
        pyfuncitem.obj(**arguments)
    if on_both or PART == "first":
        _on_the_adversarial_device(pyfuncitem.obj, arguments)
    return True


def _on_the_adversarial_device(test: Callable[..., None], arguments: dict[str, Any]) -> None:
    if "running_on" in arguments:
        arguments["running_on"] = "adversarial"
    torch.manual_seed(0)
    try:
        with adversarial_sessions():
            test(**arguments)
    except Exception as error:
        error.add_note("on the adversarial device")
        raise


@contextlib.contextmanager
def adversarial_sessions() -> Iterator[None]:
    """Sessions open the adversarial device."""
    clock = OpClock()
    opened: list[AdversarialDevice] = []

    def open_adversarial(*_: object, **__: object) -> AdversarialDevice:
        opened.append(AdversarialDevice(clock))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch, clock:
        patch.setattr("poochplan.runtime.applying.open_device", open_adversarial)
        yield
    assert [device.violations for device in opened if device.violations] == []


pytest_generate_tests, tape = on_tapes, tape_of_sessions


@pytest.fixture
def running_on() -> str:
    """The device that the test runs on: ``cpu``, or in its second run ``adversarial``."""
    return "cpu"


@pytest.fixture
def copied_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU device makes no copy in the calling thread, however small."""
    monkeypatch.setattr("poochplan.runtime.devices.cpu.SMALL_BYTES", 0)

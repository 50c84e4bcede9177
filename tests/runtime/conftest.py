"""Every test of the runtime runs on two devices: the CPU's, and the hostile one (``adversarial.py``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from adversarial import AdversarialDevice, OpClock


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("cpu_device") is None:
        if "running_on" not in metafunc.fixturenames:
            metafunc.fixturenames.append("running_on")
        hostile = pytest.param("adversarial", marks=pytest.mark.slow)
        metafunc.parametrize("running_on", ["cpu", hostile], indirect=True)


@pytest.fixture
def running_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Sessions open the device of that name."""
    if request.param == "cpu":
        yield "cpu"
        return
    clock = OpClock()
    opened: list[AdversarialDevice] = []

    def open_hostile(*_: object) -> AdversarialDevice:
        opened.append(AdversarialDevice(clock))
        return opened[-1]

    monkeypatch.setattr("poochplan.runtime.session.open_device", open_hostile)
    with clock:
        yield "adversarial"
    assert [device.violations for device in opened if device.violations] == []


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Ops of one thread, within the module: what is left behind is not to depend on the compute threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

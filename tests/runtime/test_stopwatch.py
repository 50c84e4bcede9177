"""A stopwatch tells what the compute stream spent inside its blocks, once."""

from __future__ import annotations

import time

import pytest

from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.runtime.devices.stopwatch import HostStopwatch

pytestmark = pytest.mark.cpu_device


def test_seconds_of_all_blocks_come_once_also_of_one_that_raised() -> None:
    watch = HostStopwatch()
    assert watch.take() == 0
    with watch.running():
        time.sleep(0.001)
    first = watch.take()
    assert first >= 0.001
    assert watch.take() == 0
    with pytest.raises(KeyError), watch.running():
        raise KeyError
    assert watch.take() > 0


def test_each_call_of_a_device_gives_another() -> None:
    device = CpuDevice()
    try:
        one, other = device.stopwatch(), device.stopwatch()
        with one.running():
            pass
        assert other.take() == 0 < one.take()
    finally:
        device.close()

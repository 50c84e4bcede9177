"""The spill file: private, nameless, on a disk. What happens when the disk fails is in ``test_faults.py``."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

import poochplan
from poochplan.errors import SpillError
from poochplan.runtime.devices.cpu import CpuDevice, SpillFile, choose_spill_dir, file_system_type
from poochplan.runtime.devices.transfers import copy_in, copy_out
from tests.runtime.nets import CASES, followed
from tests.runtime.random_plans import random_plan

pytestmark = pytest.mark.cpu_device
CASE = CASES["residual"]
SWAP_ALL = (0, 1, 0)


def test_the_spill_file_is_private_and_has_no_name(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    status = os.fstat(file.descriptor)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    file.close()
    file.close()


def test_the_file_is_written_once_ahead(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    file.write_ahead(20 << 20)
    status = os.fstat(file.descriptor)
    assert status.st_size == 20 << 20
    assert status.st_blocks * 512 >= 20 << 20  # allocated, not a hole
    file.close()


def test_a_directory_in_memory_is_refused() -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or file_system_type(shared_memory) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with pytest.raises(SpillError, match=r"is a tmpfs: spilling to memory saves none; name a folder on a disk"):
        choose_spill_dir(shared_memory)


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="expected a folder, found none"):
        choose_spill_dir(tmp_path / "nowhere")


def test_the_directory_can_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIR", str(tmp_path))
    assert choose_spill_dir() == tmp_path


def test_bytes_survive_the_way_out_and_back(tmp_path: Path) -> None:
    device = CpuDevice(tmp_path)
    values = [torch.randn(100_000 + index) for index in range(5)]
    copies = [copy_out(device, value.untyped_storage(), index << 20) for index, value in enumerate(values)]
    back = []
    for index, value in enumerate(values):
        copies[index].wait()
        storage = device.allocate(value.untyped_storage().nbytes())
        copy_in(device, storage, index << 20).wait()
        back.append(torch.empty(0).set_(storage, 0, value.shape))
    device.close()
    assert all(torch.equal(left, right) for left, right in zip(values, back, strict=True))


def test_a_throttle_holds_copies_to_its_rate(tmp_path: Path) -> None:
    import time

    device = CpuDevice(tmp_path, throttle_bytes_per_s=50e6)
    storage = torch.ones(5_000_000, dtype=torch.uint8).untyped_storage()
    start_s = time.perf_counter()
    copy_out(device, storage, 0).wait()
    assert time.perf_counter() - start_s >= 0.099
    device.close()


def test_short_writes_and_reads_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    plan = random_plan(CASE.profile(), 0, SWAP_ALL)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(1, len(data) // 3)], at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: preadv(fd, [data[0][: max(1, len(data[0]) // 3)]], at))
    followed(CASE, plan)


def test_a_closed_session_cannot_be_entered_again() -> None:
    session = poochplan.apply(random_plan(CASE.profile(), 0, SWAP_ALL), CASE.fresh()[0])
    with session:
        pass
    with pytest.raises(poochplan.PoochError, match="this session is closed"), session:
        pass

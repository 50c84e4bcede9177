"""Limits of cgroups are found for both versions, in the cgroup of the process and in those above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from poochplan.tensors import host_memory
from poochplan.tensors.host_memory import available_and_limit, available_bytes, io_limits


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    return tmp_path


def writes(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_limits_the_machine_is_the_limit_and_no_rate_is_named(cgroups: Path) -> None:
    assert available_and_limit()[1] in ("the machine", "its address space (ulimit -v)")
    (cgroups / "own").write_text("0::/job\n")
    writes(cgroups / "cgroup" / "job", io__max="8:0 rbps=max wbps=max riops=max wiops=max\n", memory__max="max\n")
    assert io_limits() == []
    assert available_and_limit()[1] != "its cgroup"


@pytest.mark.parametrize("is_above", [False, True])
def test_version_2(is_above: bool, cgroups: Path) -> None:
    (cgroups / "own").write_text("0::/job/step\n")
    (cgroups / "cgroup" / "job" / "step").mkdir(parents=True)
    at = cgroups / "cgroup" / "job" if is_above else cgroups / "cgroup" / "job" / "step"
    limit = "8:0 rbps=max wbps=1048576 riops=max wiops=max"
    writes(
        at, memory__max="9000\n", memory__current="5000\n", memory__stat="inactive_file 1000\n", io__max=f"{limit}\n"
    )
    assert io_limits() == [f"{limit} (io.max)"]
    assert available_and_limit() == (5000, "its cgroup")
    assert available_bytes() == 5000


def test_version_1(cgroups: Path) -> None:
    (cgroups / "own").write_text("4:memory:/job\n7:blkio:/job\n1:cpu:/job\n")
    root = cgroups / "cgroup"
    writes(root / "memory" / "job", memory__limit_in_bytes="700\n", memory__usage_in_bytes="400\n")
    writes(root / "blkio" / "job", blkio__throttle__write_bps_device="8:16 4096\n")
    assert io_limits() == ["8:16 4096 (blkio.throttle.write_bps_device)"]
    assert available_and_limit() == (300, "its cgroup")

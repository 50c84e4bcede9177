"""``pooch doctor --gpu`` on a GPU with one fault each: it is named, with what is done in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Copies of what is larger move nothing: moving takes the calling thread's time, not the simulated GPU's.
SOUND = {"NULLGPU_COPIED_BYTES": str(1 << 20), "NULLGPU_DEVICES": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
WARNING, FAILED = "warning", "failed"


def _found(folder: Path, seeded: dict[str, str]) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the findings by name."""
    ours = {name: text for name, text in os.environ.items() if not name.startswith("PYTORCH_")}
    command = [sys.executable, "-m", "poochplan", "doctor", "--gpu", "--json"]
    environment = ours | SOUND | seeded | {"XDG_CACHE_HOME": str(folder)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    data: dict[str, Any] = json.loads(ran.stdout)
    return ran.returncode, {one["name"]: one for one in data["findings"]}


FAULTS: dict[str, tuple[dict[str, str], str, str, str, str]] = {
    "no pinning": ({"NULLGPU_PINNED_BYTES": "0"}, "pinning", FAILED, "could not be pinned", "pageable memory instead"),
    "slow link": ({"NULLGPU_LINK_GBPS": "1"}, "link", WARNING, "MB/s", "plans count on the measured rates"),
    "wrong cuDNN": ({"NULLGPU_CUDNN": "80900"}, "versions", FAILED, "where torch was built with", "cudnn.enabled"),
    "no CuPy": ({}, "copies by", WARNING, "there is no CuPy", "pip install 'poochplan[cuda"),
    "default allocator": ({"PYTORCH_ALLOC_CONF": ""}, "allocator", WARNING, "segments off", "expandable_segments:True"),
    "two GPUs": ({"NULLGPU_DEVICES": "2"}, "GPU", WARNING, "2 GPUs are visible", "--device cuda:N"),
    "another process": ({"NULLGPU_OTHERS_BYTES": str(30 << 30)}, "GPU memory", WARNING, "30.0 GiB taken", "nvidia-smi"),
    "no overlap": ({"NULLGPU_OVERLAPS": "0"}, "overlap", FAILED, "ran beside a kernel", "CUDA_LAUNCH_BLOCKING"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_what_to_do(fault: str, tmp_path: Path) -> None:
    seeded, name, status, found, advice = FAULTS[fault]
    code, findings = _found(tmp_path, seeded)
    one = findings[name]
    assert one["status"] == status, one
    assert found in one["found"]
    assert advice in one["advice"]
    assert name in findings["verdict"]["found"]
    assert (code == 1) == (status == FAILED)


def test_a_gpu_without_a_fault_passes_and_bits_are_not_checked_where_nothing_computes(tmp_path: Path) -> None:
    code, findings = _found(tmp_path, {})
    assert code == 0
    assert {name for name, one in findings.items() if one["status"] == FAILED} == set()
    assert {findings[name]["status"] for name in ("GPU", "GPU memory", "versions", "pinning", "link", "events")} == {
        "ok"
    }
    assert findings["overlap"]["status"] == "ok"
    assert findings["bits"]["found"].startswith("not checked: no numerics")
    assert "swapped value" in findings["launching thread"]["found"]
    assert findings["verdict"]["found"].startswith("usable, but look at: ")

"""Memory really goes back to the system: resident sets of whole processes, in-core and under a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


SMALL = {"layers": "3", "vocabulary": "2000", "batch_size": "2"}
"""The config's sequences and width: its activations are still what takes the memory."""


def test_the_resident_set_of_a_process_falls_by_a_third_under_the_smallest_plan(tmp_path: Path) -> None:
    output = tmp_path / "resident.json"
    command = [sys.executable, "-m", "benchmarks.resident", "--workload", "gpt2", "-o", str(output)]
    for name, value in SMALL.items():
        command += ["--set", f"{name}={value}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert json.loads(output.read_text())["saving"] >= 0.3

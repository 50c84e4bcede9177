"""The tests of this folder run in a process of their own, in which the accelerator ``late`` is torch's.

Whoever registers a type of device does so for all of a process and for good. So the first test of a file here starts a
second pytest for the file, and each test has the result that it had there.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.accelerator.late import NAME, library, why_not

ROOT = Path(__file__).parents[2]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The test itself in the second process; in the first its result there."""
    found = torch.accelerator.current_accelerator()
    if found is not None and found.type == NAME:
        return None
    if found is not None:
        pytest.skip(f"the accelerator of this process is {found.type}")
    if reason := why_not():
        pytest.skip(reason)
    said = _results(pyfuncitem.path).get(pyfuncitem.name, "it did not run there")
    if said:
        pytest.fail(said, pytrace=False)
    return True


@functools.cache
def _results(path: Path) -> Mapping[str, str]:
    """By test: what went wrong, empty if nothing did."""
    library()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "-n0",
                    "-p",
                    "tests.accelerator.late",
                ),
                *(f"--junitxml={file}", str(path)),
            ],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            capture_output=True,
            text=True,
            check=False,
        )
        if not file.exists():
            return {}
        cases = ElementTree.parse(file).getroot().iter("testcase")
        found = {str(case.get("name")): "\n".join(one.text or "" for one in case) for case in cases}
    return found or {"": done.stdout}

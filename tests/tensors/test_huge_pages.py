"""Huge pages are asked for where Python still can, and a profile says where it could not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from poochplan.tensors.malloc import asks_for_huge_pages

pytestmark = pytest.mark.skipif(asks_for_huge_pages() is None, reason="the kernel gives huge pages always or never")
PROFILE = """
model = torch.nn.Linear(8, 8)
step = lambda: model(torch.ones(4, 8)).mean()
from poochplan.formats.links import preset_link
profile = poochplan.profile(step, model=model, iterations=1, link=preset_link("pcie3"))
print(sum("huge pages" in note for note in profile.notes), asks_for_huge_pages())
"""
ASK = "from poochplan.tensors.malloc import asks_for_huge_pages\n"


def ran(code: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True).stdout.strip()


def test_who_imports_the_package_before_the_first_tensor_has_them() -> None:
    assert ran(f"import torch, poochplan\n{ASK}{PROFILE}") == "0 True"


def test_who_imports_it_too_late_is_told_in_the_profile() -> None:
    assert ran(f"import torch\ntorch.ones(9)\nimport poochplan\n{ASK}{PROFILE}") == "1 False"


def test_who_does_not_want_them_has_none_and_hears_nothing() -> None:
    assert ran(f"import torch, poochplan\n{ASK}{PROFILE}", THP_MEM_ALLOC_ENABLE="0") == "0 False"

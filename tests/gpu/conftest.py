from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

# Read by cuBLAS when it is first used; deterministic algorithms need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from poochplan.profiler import link as links
from tests.cuda_rules.machine import MACHINE, on_stand_in
from tests.gpu.cases import ON_A_GPU, WHERE


def pytest_terminal_summary(terminalreporter: Any) -> None:
    where = WHERE.type if WHERE.type != "cuda" else torch.cuda.get_device_name() if ON_A_GPU else "stand-in"
    terminalreporter.write_line(f"GPU tests ran on: {where}")


@pytest.fixture(autouse=True, scope="module")
def _a_gpu() -> Iterator[None]:
    """The machine's own, or where it has none the stand-in of ``tests/cuda_rules``."""
    if ON_A_GPU or WHERE.type != "cuda":
        yield
        return
    with on_stand_in(), small_measurements():
        yield


@contextlib.contextmanager
def small_measurements() -> Iterator[None]:
    """The link in sizes that a processor moves quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "CUDA_SIZES_BYTES", (64 << 10, 1 << 20))
        patch.setattr(links, "CUDA_PROBE", (64, 1 << 16))
        patch.setattr(links, "LARGEST_PAGEABLE_BYTES", 1 << 20)
        yield


@pytest.fixture(autouse=True)
def _no_rule_was_broken() -> Iterator[None]:
    """Of those that the stand-in watches."""
    yield
    if MACHINE:
        violations, MACHINE[-1].violations[:] = list(MACHINE[-1].violations), []
        assert violations == []


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Kernels that give the same bits twice, so that bits can be compared; where there is none, a warning."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

# Read by cuBLAS when it is first used; deterministic algorithms need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")  # KiB; since torch 2.15 ops take it, and small networks would not

import pytest
import torch

from poochplan.profiler import link as links
from tests.cuda_rules.machine import MACHINE, on_stand_in
from tests.gpu.cases import NOT_COMPARED, ON_A_GPU, ON_NULL_GPU, WHERE

LEFT_OUT: list[str] = []
"""Tests that the null GPU cannot run, each with what it lacks."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = {item: item.get_closest_marker("needs") for item in items}
    left_out = [item for item, mark in marks.items() if mark is not None and ON_NULL_GPU]
    LEFT_OUT.extend(f"{item.nodeid}: {': '.join(marks[item].args)}" for item in left_out)  # type: ignore[union-attr]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    where = WHERE.type if WHERE.type != "cuda" else torch.cuda.get_device_name() if ON_A_GPU else "stand-in"
    for line in LEFT_OUT:
        terminalreporter.write_line(f"Left out: {line}")
    if NOT_COMPARED:
        terminalreporter.write_line(f"Bits not compared, for there are no numerics: in {len(NOT_COMPARED)} tests")
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
        patch.setattr(links, "DEVICE_SIZES_BYTES", (64 << 10, 1 << 20))
        patch.setattr(links, "DEVICE_PROBE", (64, 1 << 16))
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

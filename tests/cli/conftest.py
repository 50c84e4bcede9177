"""A small workload in a file of its own, its profile and a plan, and ``pooch`` as a function."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from poochplan.cli import main

WORKLOADS = '''
"""Workloads of the tests: a small network of linear layers, and functions that return the wrong thing."""

import torch

import poochplan


def small(width: int = 64, depth: int = 4, batch_size: int = 128) -> poochplan.Workload:
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(width))
    images = torch.randn(batch_size, width)
    optimizer = torch.optim.AdamW(model.parameters())
    return poochplan.Workload(model, lambda: model(images).square().mean(), optimizer)


class Boxed(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        return self.inner(images)


def boxed() -> poochplan.Workload:
    model, images = Boxed(small().model), torch.randn(512, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    return poochplan.Workload(model, lambda: model(images).square().mean(), optimizer)


def nested() -> poochplan.Workload:
    block = torch.nn.Sequential()
    block.add_module("expand", torch.nn.Linear(64, 256))
    block.add_module("activation", torch.nn.GELU())
    block.add_module("contract", torch.nn.Linear(256, 64))
    for depth in range(12):
        block = torch.nn.Sequential(*[torch.nn.Sequential()] * depth, block)
    images = torch.randn(128, 64)
    return poochplan.Workload(block, lambda: block(images).square().mean())


def noisy() -> poochplan.Workload:
    print("a workload that prints")
    return small()


def no_workload():
    return torch.nn.Linear(2, 2)


def no_scalar() -> poochplan.Workload:
    model = torch.nn.Linear(8, 8)
    return poochplan.Workload(model, lambda: model(torch.ones(4, 8)))


def _linear(step) -> poochplan.Workload:
    model = torch.nn.Linear(8, 8)
    images = torch.randn(4, 8)
    return poochplan.Workload(model, lambda: step(model, images, model(images).square().mean()))


def calls_backward() -> poochplan.Workload:
    return _linear(lambda model, images, loss: loss.backward() or loss)


def resting() -> poochplan.Workload:
    workload = small()
    workload.model.eval()
    return workload


def too_large() -> poochplan.Workload:
    return poochplan.Workload(torch.nn.Linear(8, 8), torch.empty(1 << 50).sum)


def grows_too_large() -> poochplan.Workload:
    return _linear(lambda model, images, loss: loss + torch.empty(1 << 50).sum())


def fails() -> poochplan.Workload:
    def step():
        raise ValueError("two\\nlines of trouble")

    return poochplan.Workload(torch.nn.Linear(8, 8), step)


_ONLY = torch.nn.Linear(8, 8)


def same_model() -> poochplan.Workload:
    return poochplan.Workload(_ONLY, lambda: _ONLY(torch.ones(4, 8)).sum(), torch.optim.SGD(_ONLY.parameters(), lr=0.1))


def unsteady() -> poochplan.Workload:
    workload = small()
    generator = torch.Generator()
    generator.seed()
    with torch.no_grad():
        workload.model[-1].bias.add_(torch.randn(64, generator=generator))  # the loss itself: all before is normalised
    return workload
'''


@dataclass(frozen=True)
class Result:
    """How a run of ``pooch`` ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a failed run writes, without its prefix."""
        lines = self.err.splitlines()
        assert len(lines) == 1, f"expected one line on stderr, found {self.err!r}"
        assert lines[0].startswith("pooch: error: ")
        return lines[0].removeprefix("pooch: error: ")


Pooch = Callable[..., Result]


@pytest.fixture
def pooch(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pooch:
    """Runs ``pooch`` with the given arguments, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python file of workloads."""
    path = tmp_path_factory.mktemp("workloads") / "cli_workloads.py"
    path.write_text(WORKLOADS)
    return path


@pytest.fixture(scope="session")
def profile_path(workloads: Path) -> Path:
    """A profile of ``small``."""
    path = workloads.with_name("small.profile.json")
    arguments = ["profile", f"{workloads}:small", "-o", str(path), "--iterations", "1", "--warmup", "1"]
    assert _quietly(arguments) == 0
    return path


@pytest.fixture(scope="session")
def plan_path(profile_path: Path) -> Path:
    """A plan for ``small`` at 85% of its in-core peak."""
    path = profile_path.with_name("small.plan.json")
    assert _quietly(["plan", str(profile_path), "--budget", "85%", "-o", str(path)]) == 0
    return path


def _quietly(arguments: list[str]) -> int:
    with open(os.devnull, "w") as nowhere, pytest.MonkeyPatch.context() as patch:  # noqa: PTH123
        patch.setattr("sys.stdout", nowhere)
        return main(arguments)

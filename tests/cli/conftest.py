"""A small workload in a file of its own, its profile and a plan, and ``pooch`` as a function."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import poochplan
from poochplan.cli import main
from tests.online.caches import costs_are_known, empty_cache

WORKLOADS = '''
"""Workloads of the tests: a small network of linear layers, and functions that return the wrong thing."""

import collections

import torch

import poochplan


def _of(model, *shape: int, is_trained: bool = True) -> poochplan.Workload:
    images = torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters()) if is_trained else None
    return poochplan.Workload(model, lambda: model(images).square().mean(), optimizer)


def small(width: int = 64, depth: int = 4, batch_size: int = 128) -> poochplan.Workload:
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(width))
    return _of(model, batch_size, width)


class Boxed(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        return self.inner(images)


def boxed() -> poochplan.Workload:
    return _of(Boxed(small().model), 512, 64)


def nested() -> poochplan.Workload:
    layers = {"expand": torch.nn.Linear(64, 256), "activation": torch.nn.GELU(), "contract": torch.nn.Linear(256, 64)}
    block = torch.nn.Sequential(collections.OrderedDict(layers))
    for depth in range(12):
        block = torch.nn.Sequential(*[torch.nn.Sequential()] * depth, block)
    return _of(block, 128, 64, is_trained=False)


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

    @property
    def data(self) -> Any:
        """What ``--json`` printed."""
        return json.loads(self.out)


def words(part: object) -> list[str]:
    return [str(part)] if isinstance(part, Path) else shlex.split(str(part))


@dataclass(frozen=True)
class Pooch:
    """``pooch`` as a function, of a command line in one or several parts, of which a path is one word whatever is in
    it; and the files of the tests.
    """

    capfd: pytest.CaptureFixture[str]
    workloads: Path
    profile: Path
    plan: Path

    @property
    def small(self) -> str:
        """The name of the workload that the profile and the plan are of."""
        return f"{self.workloads}:small"

    def __call__(self, command: str, *arguments: object) -> Result:
        self.capfd.readouterr()
        code = main([word for part in (command, *arguments) for word in words(part)])
        return Result(code, *self.capfd.readouterr())

    def ok(self, command: str, *arguments: object) -> Result:
        """The result of a command that ends with code 0."""
        result = self(command, *arguments)
        assert result.code == 0, result.err
        return result

    def json(self, command: str, *arguments: object) -> Any:
        """The data of such a command."""
        return self.ok(command, *arguments, "--json").data

    def refused(self, command: str, *arguments: object, code: int = 2) -> str:
        """The one line of a command that ends with that code."""
        result = self(command, *arguments)
        assert result.code == code, result
        return result.error


@pytest.fixture
def pooch(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    known_costs: Path,
    workloads: Path,
    profile_path: Path,
    plan_path: Path,
) -> Pooch:
    """Runs ``pooch`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(known_costs))
    return Pooch(capfd, workloads, profile_path, plan_path)


@pytest.fixture(scope="session")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python file of workloads."""
    path = tmp_path_factory.mktemp("workloads") / "cli_workloads.py"
    path.write_text(WORKLOADS)
    return path


@pytest.fixture(scope="session")
def known_costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the runtime's costs need not be measured."""
    folder = tmp_path_factory.mktemp("cache")
    with empty_cache(folder):
        costs_are_known()
    return folder


@pytest.fixture(scope="session")
def profile_path(workloads: Path, known_costs: Path) -> Path:
    """A profile of the workload ``small``."""
    path = workloads.with_name("small.profile.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(known_costs))
        return _written(path, "profile", f"{workloads}:small", "--iterations", "1", "--warmup", "1")


@pytest.fixture(scope="session")
def plan_path(profile_path: Path) -> Path:
    """A plan for ``small`` at 85% of its in-core peak."""
    return _written(profile_path.with_name("small.plan.json"), "plan", str(profile_path), "--budget", "85%")


@pytest.fixture(scope="session")
def profile(profile_path: Path) -> poochplan.Profile:
    return poochplan.Profile.load(profile_path)


@pytest.fixture(scope="session")
def plan(plan_path: Path) -> poochplan.Plan:
    return poochplan.Plan.load(plan_path)


def _written(path: Path, *command: str) -> Path:
    with open(os.devnull, "w") as nowhere, pytest.MonkeyPatch.context() as patch:  # noqa: PTH123
        patch.setattr("sys.stdout", nowhere)
        assert main([*command, "-o", str(path)]) == 0
    return path

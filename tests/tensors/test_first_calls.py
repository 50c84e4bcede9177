"""Before the first step of a session, a profile or a check, no function of MKL's vector library is new to the process:
its first call, by several threads at once, may be imprecise (pytorch#188792).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import poochplan
from poochplan.tensors.operators import past_first_calls
from poochplan.verify import run_in_core
from poochplan.workload import Workload
from tests.runtime.nets import LINK


def workload() -> Workload:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    batch = torch.ones(4, 8)
    return Workload(model, lambda: model(batch).mean(), torch.optim.SGD(model.parameters(), lr=0.1))


def profile(made: Workload, _: Path) -> None:
    poochplan.profile(made.step, model=made.model, optimizer=made.optimizer, link=LINK)


def in_session(made: Workload, cache: Path) -> None:
    with poochplan.auto(made.model, made.optimizer, budget="60%", cache=cache, quiet=True, link=LINK):
        made.step().backward()


def checked(_: Workload, __: Path) -> None:
    run_in_core(workload, steps=1)


@pytest.mark.parametrize("way", [profile, in_session, checked])
def test_every_function_was_called_on_one_element_before(
    way: Callable[[Workload, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tanh, calls = torch.tanh, list[tuple[int, torch.dtype]]()

    def spied(tensor: torch.Tensor) -> torch.Tensor:
        calls.append((tensor.numel(), tensor.dtype))
        return tanh(tensor)

    made = workload()
    monkeypatch.setattr(torch, "tanh", spied)
    past_first_calls.cache_clear()
    way(made, tmp_path)
    assert calls[:3] == [(1, torch.float32), (1, torch.float64), (32, torch.float32)]

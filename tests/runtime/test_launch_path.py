"""The plans of the launch path's benchmark load and are followed on its stand-in for a GPU; the benchmark tells all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import poochplan
from benchmarks import launch
from benchmarks.launch import load_plan, network
from benchmarks.launch_device import stand_in

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread")]


def _gradients(plan: poochplan.Plan | None, copies: str = "runtime") -> list[torch.Tensor]:
    model, forward = network()
    torch.manual_seed(1)
    if plan is None:
        forward().backward()  # type: ignore[no-untyped-call]
    else:
        with stand_in(copies) as device, poochplan.apply(plan, model, meter="never", device=device) as run:
            forward().backward()  # type: ignore[no-untyped-call]
            assert run.report().total.fallbacks == 0
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def in_core() -> list[torch.Tensor]:
    return _gradients(None)


@pytest.mark.parametrize("name", launch.PLANS)
def test_each_plan_is_followed_bitwise_on_the_stand_in(name: str, in_core: list[torch.Tensor]) -> None:
    planned = _gradients(load_plan(name), {"mixed": "cupy", "third": "torch"}.get(name, "runtime"))
    assert len(in_core) == len(planned) > 100
    assert all(torch.equal(one, other) for one, other in zip(in_core, planned, strict=True))


def test_a_quick_run_tells_every_ratio_and_every_cost(tmp_path: Path) -> None:
    output = tmp_path / "launch.json"
    assert launch.main(["--quick", "--plans", "keep,swap", "-o", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["plans"].keys() == {"keep", "swap"}
    assert (
        found["plans"]["swap"]["step"]["median_ratio"] > found["floors"][launch.MINIMAL_HOOKS]["step"]["median_ratio"]
    )
    assert {"a pack and its unpack", "a swapped value"} < found["costs_in_plain_ops"].keys()
    assert found["plans"]["swap"]["out_bytes"] > 10_000_000


def test_an_unknown_plan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main(["--plans", "keep,best"])
    assert "found best" in capsys.readouterr().err

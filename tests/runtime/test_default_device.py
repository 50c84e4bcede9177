"""What the user sets as torch's default device is for the user's tensors: ours name theirs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import poochplan
from tests.runtime.nets import CASES, LINK, followed
from tests.runtime.random_plans import random_plan

SWAPS, REPLAYS = (0, 1, 0), (0, 0, 1)
ROOT = Path(__file__).parents[2]
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


@pytest.mark.parametrize("weights", [SWAPS, REPLAYS])
@pytest.mark.parametrize("name", ["residual", "attention"])
def test_a_session_within_a_device_context_gives_the_gradients_of_in_core_training(
    name: str, weights: tuple[float, float, float]
) -> None:
    others = torch.device("meta")

    def at(place: str) -> None:
        if place == "step":
            others.__enter__()
        elif place == "backward":
            others.__exit__(None, None, None)

    case = CASES[name]
    total = followed(case, random_plan(case.profile(), 1, weights), at=at).total
    assert total.out_bytes + total.replayed_values > 0


@pytest.mark.cpu_device
@pytest.mark.parametrize("mode", ["run", "swap-all"])
def test_a_profile_and_a_session_under_another_default_device_are_as_always(mode: str) -> None:
    model, step, _ = CASES["residual"].fresh()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # AdamW of torch 2.12 counts its steps on the default device
    options = {"model": model, "optimizer": optimizer, "iterations": 1, "mode": mode, "link": LINK}
    usual = poochplan.profile(step, **options)  # type: ignore[call-overload]
    torch.set_default_device("meta")
    try:
        profile = poochplan.profile(step, **options)  # type: ignore[call-overload]
        plan = random_plan(profile, 0, SWAPS)
        with poochplan.apply(plan, model) as session:
            step().backward()
    finally:
        torch.set_default_device(None)
    assert profile.ops_fingerprint == usual.ops_fingerprint
    assert session.report().total.fallbacks == 0
    assert session.report().total.out_bytes > 0


@pytest.mark.cpu_device
def test_every_tensor_that_the_package_makes_names_its_device() -> None:
    nameless = []
    for room in ("profiler", "runtime", "src/poochplan/tensors", "src/poochplan/torch_private"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for call in ast.walk(ast.parse(path.read_text())):
                if _makes_a_tensor(call) and "device" not in {keyword.arg for keyword in call.keywords}:  # type: ignore[attr-defined]
                    nameless.append(f"{path.relative_to(ROOT)}:{call.lineno}")  # type: ignore[attr-defined]
    assert nameless == [], f"expected device=... in {nameless}"


def _makes_a_tensor(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in CONSTRUCTORS
    )

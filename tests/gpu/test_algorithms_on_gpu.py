"""Kernels whose bits depend on more than their arguments: on the thread, on switches, on memory that nobody writes."""

from __future__ import annotations

import warnings

import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import saved_values
from poochplan.runtime.run_report import FallbackKind
from tests.gpu.cases import ABOUT_CUDA, CASES, ON_A_GPU, case_of, each, reference, takes_what_is_predicted
from tests.runtime.nets import equal, followed, train
from tests.runtime.random_plans import random_plan

pytestmark = ABOUT_CUDA
REPLAY = (0, 0, 1)
CONVOLVING = ("residual", "autocast", "channels_last", "two_streams_wait")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


def _unreplayable(profile: Profile, operator: str) -> set[str]:
    """Reasons of the saved values that the operator bears."""
    born = {number for op in profile.ops if op.name.startswith(f"aten.{operator}") for number in op.outputs}
    return {profile.values[number].unreplayable for number in saved_values(profile) if number in born}


@pytest.mark.usefixtures("benchmark")
@pytest.mark.parametrize("name", each(CONVOLVING, ("residual",)))
def test_a_convolution_that_is_chosen_by_timing_is_part_of_no_replay(name: str) -> None:
    case = CASES[name]
    profile = case.new_profile()
    assert _unreplayable(profile, "convolution") == {"aten.convolution.default cannot be run again"}
    assert any("cudnn.benchmark is on" in line for line in profile.advice())
    plan = random_plan(profile, 0, REPLAY)
    assert Decision.RECOMPUTE in {value.decision for value in plan.values}
    followed(case, plan, wanted=reference(case, 2))
    takes_what_is_predicted(case, profile)


def _planned_without_benchmark() -> Plan:
    profile = CASES["residual"].new_profile()
    return msgspec.structs.replace(random_plan(profile, 0, REPLAY), switches=profile.switches)


def test_a_run_under_other_switches_is_told_and_its_convolutions_are_swapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, plan = CASES["residual"], _planned_without_benchmark()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    in_core = reference(case, 2)
    with pytest.warns(RuntimeWarning, match=r"other switches of torch \(benchmark False, now True\)"):
        planned, report = train(case, 2, plan)
    assert equal(in_core, planned)
    assert report is not None
    assert FallbackKind.NOT_REPLAYABLE in report.total.fallback_kinds


def test_a_profile_says_the_switches_of_its_kernels_and_a_run_under_the_same_is_not_told() -> None:
    profile = CASES["residual"].new_profile()
    assert profile.switches.keys() >= {"matmul_tf32", "cudnn_tf32", "benchmark", "deterministic"}
    plan, model = _planned_without_benchmark(), CASES["residual"].fresh()[0]
    assert plan.switches == profile.switches == poochplan.plan(profile, "90%", policy="greedy").switches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        poochplan.apply(plan, model)


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_what_attention_leaves_unwritten_spoils_no_other_value(kernel: str) -> None:
    case = case_of(f"sdpa_{kernel}_without_dropout")
    profile = case.new_profile()
    operator = f"_scaled_dot_product_{kernel}_attention.default"
    unwritten = f"aten.{operator} leaves some of its bytes unwritten"
    # Torch 2.11 and 2.12 have the seed of the efficient one on the host, where no value is.
    is_on_host = kernel == "efficient" and ON_A_GPU and torch.__version__.startswith(("2.11.", "2.12."))
    assert _unreplayable(profile, operator) == ({""} if is_on_host else {"", unwritten})
    plan = random_plan(profile, 0, REPLAY)
    followed(case, plan, wanted=reference(case, 2))

"""Verification is bit by bit and names the first tensor that differs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import poochplan
from poochplan.verify import (
    StepRecord,
    bitwise_equal,
    check,
    first_difference,
    run_in_core,
)


def record(**changes: dict[str, torch.Tensor]) -> StepRecord:
    tensors = {kind: {"a.weight": torch.ones(3), "b.weight": torch.ones(2, 2)} for kind in ("gradients", "parameters")}
    return dataclasses.replace(StepRecord(torch.ones(()), buffers={"bn.mean": torch.zeros(2)}, **tensors), **changes)


def build() -> poochplan.Workload:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8))
    images = torch.randn(16, 8)
    return poochplan.Workload(model, lambda: model(images).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.ones(2, 3).t(), torch.ones(3, 2), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), False),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), True),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor(7), torch.tensor(7), True),
    ],
)
def test_equality_is_of_bits(left: torch.Tensor, right: torch.Tensor, equal: bool) -> None:
    assert bitwise_equal(left, right) is equal


def test_the_first_difference_names_step_kind_tensor_and_size() -> None:
    ones, fewer = record(), record(gradients={"a.weight": torch.ones(3)})
    off = record(gradients={"a.weight": torch.ones(3), "b.weight": torch.tensor([[1.0, 1.0], [1.5, 1.0]])})
    assert first_difference([ones, record()], [ones, record()]) is None
    for first, second, told in (
        ([ones, ones], [ones, off], "step 1: gradient b.weight differs: 1 of 4 elements, by up to 0.5"),
        ([ones], [record(loss=torch.zeros(()))], "step 0: loss differs: 1 of 1 elements, by up to 1"),
        (
            [ones],
            [dataclasses.replace(ones, states={"a.weight exp_avg": "1"})],
            "step 0: optimizer state a.weight exp_avg differs",
        ),
        ([ones], [fewer], "step 0: gradient b.weight differs: there in-core and missing under the plan"),
    ):
        assert first_difference(first, second) == told
    assert "missing in-core" in str(first_difference([fewer], [ones]))
    assert first_difference([ones], [record(buffers={"bn.mean": torch.full((2,), -0.0)})]) is not None


def test_two_in_core_runs_from_one_seed_are_equal_and_from_two_are_not() -> None:
    first, again, other = (run_in_core(build, steps=2, timed_steps=0, seed=seed) for seed in (1, 1, 2))
    assert len(first.records) == 2
    assert first_difference(first.records, again.records) is None
    assert first_difference(first.records, other.records) is not None
    one, two = first.records  # copies of what goes on changing
    assert not torch.equal(one.parameters["0.weight"], two.parameters["0.weight"])
    assert not torch.equal(one.buffers["2.running_mean"], two.buffers["2.running_mean"])


def test_copying_for_the_comparison_does_not_count_as_the_steps_memory() -> None:
    torch.manual_seed(0)
    workload = build()
    profile = poochplan.profile(workload.step, model=workload.model, optimizer=workload.optimizer, iterations=1)
    plan = poochplan.plan(profile, "200%")
    compared = check(build, plan, steps=3, timed_steps=1, seed=5)
    assert compared.difference is None
    assert compared.compared_tensors == 3 * (1 + 4 + 3 + 4)
    metered = [report.peak_bytes for report in compared.planned.step_reports if report.peak_bytes is not None]
    assert max(metered) <= 1.01 * profile.in_core_peak_bytes + 1024
    assert (len(compared.planned.seconds), len(compared.in_core.seconds)) == (1, 2)  # in-core before and after


def test_a_digest_is_of_bits_dtype_and_shape() -> None:
    zeros = [torch.zeros(2), -torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)]
    zero, *_ = digests = [StepRecord(one, {}, {}, {}).digests()["loss"] for one in zeros]
    assert StepRecord(torch._efficientzerotensor(2), {}, {}, {}).digests()["loss"] == zero  # type: ignore[attr-defined]
    assert len(set(digests)) == 4
    turned = torch.randn(3, 2).t()
    assert StepRecord(turned, {}, {}, {}).digests() == StepRecord(turned.contiguous(), {}, {}, {}).digests()

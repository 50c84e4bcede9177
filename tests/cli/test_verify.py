"""Verification is bit by bit and names the first tensor that differs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.json_schema import json_schema
from poochplan.formats.run_record import Certificate
from poochplan.sessions import digest
from poochplan.verify import (
    StepRecord,
    bitwise_equal,
    certificate_of,
    check,
    first_difference,
    run_in_core,
    run_steps,
    seed_everything,
)

from .conftest import Pooch


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


def test_copying_for_the_comparison_does_not_count_as_the_steps_memory_and_a_session_has_the_same_digests() -> None:
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
    certificate = certificate_of(compared, 5)
    seed_everything(5)
    workload = build()
    with poochplan.apply(plan, workload.model, certify=True) as session:
        run_steps(workload, 3, session=session)
    found = session.report().certificate
    assert found is not None
    assert found.planned == certificate.planned == certificate.in_core


def checked(path: Path) -> Certificate:
    """What is in the file, which keeps to its schema."""
    jsonschema.validate(json.loads(path.read_bytes()), json.loads(json_schema(Certificate)))
    return Certificate.load(path)


def test_a_certificate_has_the_digests_of_every_step_of_both_runs(pooch: Pooch) -> None:
    pooch.ok(f"run {pooch.small} --plan {pooch.plan} --check --certificate certificate.json")
    found = checked(Path("certificate.json"))
    assert found.equal
    assert len(found.in_core) == 3
    assert found.in_core == found.planned
    first = found.in_core[0]
    assert set(first.gradients) == set(first.parameters) > {"0.weight"}
    assert set(first.generators) == {"cpu"}
    assert first.parameters != found.in_core[1].parameters


def test_a_certificate_of_another_seed_is_another(pooch: Pooch) -> None:
    command = f"run {pooch.small} --plan {pooch.plan} --check --timed 1 --steps 1 --certificate c.json --force --seed"
    losses = []
    for seed in (0, 0, 1):
        pooch.ok(command, seed)
        losses.append(Certificate.load("c.json").planned[0].loss)
    assert losses[0] == losses[1] != losses[2]


def run_certified(plan: poochplan.Plan, path: Path, *, away: bool, steps: int = 3) -> Certificate:
    """The same training under the plan, or in-core beside it; each step has two micro-steps."""
    seed_everything(3)
    workload = build()
    assert workload.optimizer is not None
    with warnings.catch_warnings(), poochplan.apply(plan, workload.model, certify=True) as session:
        warnings.simplefilter("ignore")  # of a session that sees no step
        with session.away() if away else contextlib.nullcontext():
            for _ in range(steps):
                workload.optimizer.zero_grad(set_to_none=True)
                for _ in range(2):
                    workload.step().backward()  # type: ignore[no-untyped-call]
                workload.optimizer.step()
    found = session.report().certificate
    assert found is not None
    return checked(found.save(path))


def test_two_sessions_certify_that_planned_steps_left_what_those_in_core_did(pooch: Pooch, tmp_path: Path) -> None:
    workload = build()
    profile = poochplan.profile(workload.step, model=workload.model, accumulate=True, iterations=1)
    plan = poochplan.plan(profile, poochplan.smallest_budget(profile), evaluations=100)
    planned = run_certified(plan, tmp_path / "planned.json", away=False)
    in_core = run_certified(plan, tmp_path / "in-core.json", away=True)
    assert (planned.equal, planned.seed, len(planned.planned), len(planned.in_core)) == (None, 3, 3, 0)
    assert (len(in_core.planned), len(in_core.in_core)) == (0, 3)
    assert planned.followed == (plan.fingerprint,) * 3
    pooch.ok("diff planned.json in-core.json")
    assert "0 in-core, 3 planned, 3 of them followed a plan" in pooch("show planned.json").out
    second = msgspec.structs.replace(planned.planned[1], gradients=planned.planned[1].gradients | {"0.bias": "other"})
    other = msgspec.structs.replace(planned, planned=(planned.planned[0], second, planned.planned[2]))
    other.save(tmp_path / "other.json")
    run_certified(plan, tmp_path / "fewer.json", away=False, steps=2)
    for name, difference in (("other", "step 1: gradient 0.bias differs"), ("fewer", "3 steps against 2")):
        shown = pooch(f"diff planned.json {name}.json")
        assert (shown.code, difference in shown.out) == (1, True), "the first that they do not share"


def test_a_digest_is_of_bits_dtype_and_shape() -> None:
    zeros = [torch.zeros(2), -torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)]
    assert digest(torch._efficientzerotensor(2)) == digest(zeros[0])  # type: ignore[attr-defined]
    assert len({StepRecord(one, {}, {}, {}).digests().loss for one in zeros}) == 4
    turned = torch.randn(3, 2).t()
    assert StepRecord(turned, {}, {}, {}).digests() == StepRecord(turned.contiguous(), {}, {}, {}).digests()

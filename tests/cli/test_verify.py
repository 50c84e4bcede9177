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
from poochplan.errors import StepError
from poochplan.formats.json_schema import json_schema
from poochplan.formats.run_record import Certificate
from poochplan.profiler.step.forward_only import checked_loss
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
    assert first_difference([record(), record()], [record(), record()]) is None
    off = record(gradients={"a.weight": torch.ones(3), "b.weight": torch.tensor([[1.0, 1.0], [1.5, 1.0]])})
    assert first_difference([record(), record()], [record(), off]) == (
        "step 1: gradient b.weight differs: 1 of 4 elements, by up to 0.5"
    )
    assert first_difference([record()], [record(buffers={"bn.mean": torch.full((2,), -0.0)})]) is not None
    assert first_difference([record()], [record(loss=torch.zeros(()))]) == (
        "step 0: loss differs: 1 of 1 elements, by up to 1"
    )


def test_a_missing_or_added_gradient_is_a_difference() -> None:
    fewer = record(gradients={"a.weight": torch.ones(3)})
    assert first_difference([record()], [fewer]) == (
        "step 0: gradient b.weight differs: there in-core and missing under the plan"
    )
    assert "missing in-core" in str(first_difference([fewer], [record()]))


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
    compared = check(build, poochplan.plan(profile, "200%"), steps=3, timed_steps=1)
    assert compared.difference is None
    assert compared.compared_tensors == 3 * (1 + 4 + 3 + 4)
    metered = [report.peak_bytes for report in compared.planned.step_reports if report.peak_bytes is not None]
    assert max(metered) <= 1.01 * profile.in_core_peak_bytes + 1024
    assert (len(compared.planned.seconds), len(compared.in_core.seconds)) == (1, 2)  # in-core before and after


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3.0, "found float"),
        (torch.ones(2, requires_grad=True), r"found shape \[2\]"),
        (torch.ones(()), "found one that does not"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: object, message: str) -> None:
    with pytest.raises(StepError, match=message):
        checked_loss(loss, torch.nn.Linear(1, 1))


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


def test_diff_names_the_first_digest_that_two_certificates_do_not_share(pooch: Pooch, tmp_path: Path) -> None:
    workload = build()
    plan = poochplan.plan(poochplan.profile(workload.step, model=workload.model, accumulate=True, iterations=1), "100%")
    found = run_certified(plan, tmp_path / "a.json", away=False)
    second = msgspec.structs.replace(found.planned[1], gradients=found.planned[1].gradients | {"0.bias": "other"})
    other = msgspec.structs.replace(found, planned=(found.planned[0], second, found.planned[2]))
    other.save(tmp_path / "b.json")
    run_certified(plan, tmp_path / "c.json", away=False, steps=2)
    for name, difference in (("b", "step 1: gradient 0.bias differs"), ("c", "3 steps against 2")):
        shown = pooch(f"diff a.json {name}.json")
        assert (shown.code, difference in shown.out) == (1, True)


def test_a_session_and_a_check_have_the_same_digests() -> None:
    workload = build()
    profile = poochplan.profile(workload.step, model=workload.model, optimizer=workload.optimizer, iterations=1)
    plan = poochplan.plan(profile, "100%", evaluations=1)
    compared = certificate_of(check(build, plan, steps=2, timed_steps=0, seed=5), 5)
    seed_everything(5)
    workload = build()
    with poochplan.apply(plan, workload.model, certify=True) as session:
        run_steps(workload, 2, session=session)
    found = session.report().certificate
    assert found is not None
    assert found.planned == compared.planned == compared.in_core


def test_a_digest_is_of_bits_dtype_and_shape() -> None:
    zeros = [torch.zeros(2), -torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)]
    assert digest(torch._efficientzerotensor(2)) == digest(zeros[0])  # type: ignore[attr-defined]
    assert len({StepRecord(one, {}, {}, {}).digests().loss for one in zeros}) == 4
    turned = torch.randn(3, 2).t()
    assert StepRecord(turned, {}, {}, {}).digests() == StepRecord(turned.contiguous(), {}, {}, {}).digests()

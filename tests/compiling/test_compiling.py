"""One call compiles a model with a plan inside; its steps are bitwise those of the model compiled without."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import poochplan
from poochplan.errors import InfeasibleError, ModelMismatchError, PoochError, StepError, UsageError
from poochplan.formats.plan import Decision, Plan
from poochplan.tensors.modes import compiled_modules
from tests.compiling.small_nets import SLOW_LINK, followed, fresh, stock, train
from tests.processes import python
from tests.runtime.nets import LINK, equal
from tests.runtime.served import needs_inductor

SCRIPT = """
    from tests.allocated_bytes import allocated_bytes
    allocated_bytes()  # before anything is allocated
    import gc, json, sys, torch, poochplan
    from tests.compiling.small_nets import fresh
    found = []
    for path in sys.argv[1:]:
        plan, peaks = poochplan.Plan.load(path), []
        model, step, optimizer = fresh()
        poochplan.compile(model, plan=plan)
        with poochplan.apply(plan, model, arena="off", meter="never") as session:
            step().backward()  # what compiling takes is not the step's
            for _ in range(4):
                optimizer.zero_grad(set_to_none=True)
                gc.collect()
                kinds = ("parameter", "buffer", "input", *(("optimizer_state",) if optimizer.state else ()))
                there = allocated_bytes().live - sum(plan.static_bytes[kind] for kind in kinds)
                allocated_bytes().restart()
                loss = step()
                loss.backward()
                optimizer.step()
                peaks.append(allocated_bytes().peak - there)
                del loss
        found.append({"peaks": peaks, "budget": plan.budget_bytes, "predicted": plan.prediction.peak_bytes,
                      "in_core": plan.prediction.in_core_peak_bytes, "fallbacks": session.report().total.fallbacks})
        del model, step, optimizer, session
    print(json.dumps(found))
"""
"""Run in a process of its own, in which the hook of ``tests/allocated_bytes.py`` is there before anything else."""
pytestmark = [needs_inductor, pytest.mark.cpu_device]


@pytest.fixture(scope="module", autouse=True)
def _clean_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def in_core() -> list[list[torch.Tensor]]:
    return stock()


@pytest.fixture(scope="module")
def swapping(in_core: list[list[torch.Tensor]]) -> Plan:
    session = followed(fresh, in_core, "80%", LINK)
    assert session.report().total.out_bytes > 0
    return session.plan


@pytest.fixture(scope="module")
def recomputing() -> Plan:
    model, step, optimizer = fresh()
    options = {"link": SLOW_LINK, "iterations": 1, "time_limit_s": 2}
    return poochplan.compile(model, step, optimizer=optimizer, budget="90%", **options).plan  # type: ignore[arg-type]


def test_a_compiled_model_keeps_its_budget_with_the_bits_of_stock_inductor(swapping: Plan) -> None:
    assert swapping.prediction.peak_bytes <= swapping.budget_bytes < swapping.prediction.in_core_peak_bytes


def test_nothing_of_model_optimizer_or_generators_is_changed_by_the_call(
    in_core: list[list[torch.Tensor]], swapping: Plan
) -> None:
    model, step, optimizer = fresh()
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    poochplan.compile(model, step, optimizer=optimizer, budget="120%", link=LINK, iterations=1, time_limit_s=1)
    after = (*model.parameters(), *model.buffers(), torch.get_rng_state())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert equal(train(model, step, optimizer), in_core)


def test_over_a_slow_link_values_are_recomputed_inside_the_graphs(recomputing: Plan) -> None:
    assert recomputing.replays
    assert "recomputed inside compiled graphs" in recomputing.notes[-1]
    assert all(value.decision is Decision.KEEP for value in recomputing.values)


def test_no_step_in_a_new_process_takes_more_than_the_budget_by_an_outside_meter(
    swapping: Plan, recomputing: Plan, tmp_path: Path
) -> None:
    files = [plan.save(tmp_path / f"{place}.json") for place, plan in enumerate((swapping, recomputing))]
    for found in json.loads(python(SCRIPT, *files).splitlines()[-1]):
        assert all(peak <= found["budget"] < found["in_core"] for peak in found["peaks"]), found
        assert max(found["peaks"]) == pytest.approx(found["predicted"], rel=0.02)
        assert found["fallbacks"] == 0


def test_saved_plans_need_no_step_to_profile_and_one_after_another_each_has_its_own_code_with_the_same_bits(
    swapping: Plan, recomputing: Plan, in_core: list[list[torch.Tensor]], tmp_path: Path
) -> None:
    for plan in (recomputing, swapping, recomputing):
        model, step, optimizer = fresh()
        with poochplan.compile(model, plan=Plan.load(plan.save(tmp_path / "plan.json", force=True))) as session:
            assert equal(train(model, step, optimizer), in_core)
            assert session.report().total.fallbacks == 0
            assert (session.report().total.out_bytes > 0) == (plan is swapping)
        del model, step, optimizer, session  # or they would count beside the next one's steps


def test_a_model_is_trained_on_after_its_session_and_validated_inside_it(
    recomputing: Plan, in_core: list[list[torch.Tensor]]
) -> None:
    model, step, optimizer = fresh()
    with poochplan.compile(model, plan=recomputing):
        found = train(model, step, optimizer, 2)
        model.eval()
        state = torch.get_rng_state()
        with torch.no_grad():
            inside = step()
        torch.set_rng_state(state)
        model.train()
    model.eval()
    with torch.no_grad():
        assert torch.equal(step(), inside)
    model.train()
    torch.set_rng_state(state)
    optimizer.zero_grad(set_to_none=True)
    loss = step()
    loss.backward()
    assert equal(found, in_core[:2])
    assert torch.equal(loss.detach(), in_core[2][0])
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, in_core[2][1:], strict=False))  # type: ignore[arg-type]


def test_a_plan_with_replays_is_refused_by_apply_for_any_other_model(recomputing: Plan, swapping: Plan) -> None:
    model, _, _ = fresh()
    with pytest.raises(UsageError, match=r"this plan is for a model that poochplan\.compile has compiled") as error:
        poochplan.apply(recomputing, model)
    assert "\n" not in str(error.value)
    model.compile(dynamic=False)
    with pytest.raises(UsageError, match=r"call poochplan.compile\(model, plan=plan\) \(pooch run --compile\)"):
        poochplan.apply(recomputing, model)
    other, _, _ = fresh()
    poochplan.compile(other, plan=swapping)
    with pytest.raises(UsageError, match=r"that poochplan\.compile has compiled"):
        poochplan.apply(recomputing, other)


def test_a_budget_that_nothing_fits_is_one_line_and_leaves_the_model_as_it_was() -> None:
    model, step, optimizer = fresh()
    with pytest.raises(InfeasibleError) as error:
        poochplan.compile(model, step, optimizer=optimizer, budget="30%", link=LINK, iterations=1, time_limit_s=1)
    assert "no plan fits a budget of" in str(error.value)
    assert "\n" not in str(error.value)
    assert "compile its blocks" not in str(error.value)
    assert not compiled_modules(model)


def test_a_step_that_counts_its_calls_is_refused_before_anything_is_planned() -> None:
    """It reads the counter, so that no comparison of two steps says anything about the kernels."""
    model, step, optimizer = fresh()
    calls = itertools.count(1)
    message = "expected a step that gives the same bits when it is repeated .* found the loss to differ"
    counting = lambda: step() * next(calls)  # noqa: E731
    _refused(StepError, message, model, counting, optimizer=optimizer, budget="60%", link=LINK)
    assert not compiled_modules(model)


def _refused(kind: type[PoochError], message: str, model: torch.nn.Module, *args: object, **options: object) -> None:
    with pytest.raises(kind, match=message) as error:
        poochplan.compile(model, *args, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_what_cannot_be_compiled_is_refused_in_one_line(swapping: Plan) -> None:
    model, step, _ = fresh()
    _refused(UsageError, "expected either a budget or a plan", model, step)
    _refused(UsageError, "expected either a budget or a plan", model, step, budget="60%", plan=swapping)
    _refused(UsageError, "expected the training step to measure, found none", model, budget="60%")
    _refused(UsageError, "expected no backend, found 'eager'", model, step, budget="60%", backend="eager")
    _refused(UsageError, "expected a model on the CPU, found it on meta", model.to("meta"), step, budget="60%")
    _refused(ModelMismatchError, "this plan is for another model", torch.nn.Linear(2, 2), plan=swapping)
    part, _, _ = fresh()
    part.first.compile(backend="eager")  # type: ignore[operator]
    _refused(UsageError, "expected a model that is not compiled, found first compiled", part, step, budget="60%")
    part.compile(backend="eager")
    _refused(UsageError, "found a compiled one; give the module itself", part, step, budget="60%")

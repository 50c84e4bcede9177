"""A plan holds something smaller in place of a saved value: the source of a larger copy, the bits of a mask, or indices
and casts in fewer bytes. Gradients stay bitwise those of in-core training, at the bytes simulated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.narrow import masks_of
from poochplan.formats.plan import Decision, PlannedValue
from poochplan.formats.sources import sources_of
from tests.depth import seeds
from tests.live_bytes import LiveBytes
from tests.planner.checker import check
from tests.planner.plans import random_decisions
from tests.runtime.narrow_nets import CASTS, COUNTS, FORMS, MASKS, NAMES, Drawn, Formed
from tests.runtime.nets import Case, Net, equal, followed, in_core, metered_peaks, of, our_warnings
from tests.runtime.random_plans import gradient_bits, held, planned, problem_of, with_slow_copies
from tests.runtime.served import SETTLED, Loop, needs_compiler

KEEP, SWAP, RECOMPUTE = Decision
SOURCES = {f"sources of {name}": case for name, case in CASTS.items()}
BITS = {f"bits of {name}": case for name, case in MASKS.items()}
CASES = SOURCES | BITS | FORMS
NARROWED = {name: ["bits"] * COUNTS[name.removeprefix("bits of ")] for name in BITS} | NAMES
"""The narrow forms in each case, in the order of their save points."""
SHARES = {"uint8": 8, "uint16": 4, "int32": 2, "bfloat16": 2}
"""How many times the bytes of a form indices of 64 bits, or float32, take."""
ROWS = {"Branches": "integers of indices", "Choices": "integers of indices", "Casts": "upper halves of casts"}
"""What a plan's table says of the forms that the planner takes."""


def form_of(value: PlannedValue) -> str:
    return value.name.rpartition(" as ")[2]


DECIDED = [(name, one) for name in CASES for one in Decision if name not in FORMS or one is not RECOMPUTE]


@pytest.mark.parametrize(("name", "decision"), DECIDED)
def test_it_is_held_swapped_or_made_again_in_place_of_the_value(name: str, decision: Decision) -> None:
    case, problem = CASES[name], problem_of(CASES[name])
    wish = held(problem, decision)
    plan, found = planned(case, wish)
    narrowed = [value for value in plan.values if value.bits]
    assert [form_of(value) for value in narrowed] == NARROWED.get(name, [])
    sizes = {value.name: value.size_bytes for value in case.profile().values}
    for value in narrowed if name in FORMS else ():
        assert value.dtype == form_of(value)
        assert SHARES[value.dtype] * value.size_bytes == sizes[value.name.rpartition(" as ")[0]]
        assert value.until >= 0
        assert value.decision is decision
    replayed = {copy for copy in problem.copies.values() if wish[copy] is RECOMPUTE}
    assert len(replayed) >= (4 if name in SOURCES else len(narrowed))
    assert followed(case, plan, 3).last_step.replayed_values >= len(replayed)
    assert metered_peaks(case, plan)[1] == found.simulation.peak_bytes
    assert check(case.profile(), plan).peak_bytes == found.simulation.peak_bytes
    if decision is not RECOMPUTE:
        model, loss_of = case.make()
        assert gradient_bits(model, loss_of, plan) == gradient_bits(model, loss_of)


@pytest.mark.parametrize("name", CASES)
def test_any_decisions_give_the_gradients_of_in_core_training(name: str) -> None:
    for seed in seeds(3, 40):
        decisions = random_decisions(problem_of(CASES[name]), seed)
        plan, found = planned(CASES[name], decisions, (0.0, 0.7, 0.9)[seed % 3], seed % 3)
        followed(CASES[name], plan, 2)
        simulated = found.simulation
        assert metered_peaks(CASES[name], plan) == [simulated.first_step_peak_bytes, simulated.peak_bytes]


@pytest.mark.parametrize("name", [*SOURCES, *BITS, *ROWS])
def test_plans_of_the_planner_hold_them_within_a_budget_that_an_outside_meter_sees_kept(name: str) -> None:
    case = CASES[name]
    profile = with_slow_copies(case.profile())
    ops = tuple(msgspec.structs.replace(op, duration_s=1e-4) for op in profile.ops)  # copies take longer
    profile = msgspec.structs.replace(profile, ops=ops)
    smallest = poochplan.smallest_budget(profile, arena="off")
    budget_bytes = smallest + (profile.in_core_peak_bytes - smallest) // (8 if name in FORMS else 4)
    plan, without = (
        poochplan.plan(profile, budget_bytes, evaluations=300, arena="off", gap=0.0, without=without)
        for without in ((), ("sources", "narrow"))
    )
    held_ones = [one for one in plan.values if one.source and one.until >= 0 and one.decision is not RECOMPUTE]
    assert any(one.bits for one in held_ones) if name in BITS else held_ones
    assert not any(value.source for value in without.values)
    assert check(profile, plan).peak_bytes == plan.prediction.peak_bytes <= budget_bytes
    assert plan.prediction.step_s <= without.prediction.step_s
    if name not in SOURCES:
        rows = {"bits of masks", *ROWS.values()}.intersection(plan.rows())
        assert rows == {ROWS.get(name, "bits of masks")}
    assert _live_peak(case.fresh(), plan) <= budget_bytes + profile.static_bytes.get("input", 0)


def _live_peak(fresh: tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer], plan: poochplan.Plan) -> int:
    """Of two steps, with the batch, which the meter sees as it is read."""
    model, step, optimizer = fresh
    peaks, loss = list[int](), torch.zeros(())
    with poochplan.apply(plan, model, meter="never") as session:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            state = [tensor for entries in optimizer.state.values() for tensor in entries.values()]
            with LiveBytes(*model.parameters(), *state, loss) as meter:
                loss = step()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            peaks.append(meter.peak)
    assert session.report().total.fallbacks == 0
    return max(peaks)


SERVED = [(name, SWAP) for name in SOURCES] + [
    (name, one) for name in (*BITS, "Pools", "Casts") for one in (KEEP, SWAP)
]


@pytest.mark.cpu_device
@needs_compiler
@pytest.mark.parametrize(("name", "decision"), SERVED)
def test_steps_that_hold_them_are_served_from_an_arena(name: str, decision: Decision) -> None:
    case = CASES[name]
    wish = held(problem_of(case), decision, RECOMPUTE if name in SOURCES else KEEP)
    plan, _ = planned(case, wish, is_laid_out=True)
    loop = Loop(case)
    with poochplan.apply(plan, loop.model, arena="on") as session:
        loop.session = session
        loop.steps(SETTLED + 2)
        assert loop.is_served_whole
        assert session.report().total.fallbacks == 0
    assert equal(loop.seen, in_core(case, SETTLED + 2))


# -- what looks alike ------------------------------------------------------------------------------------------------


def drawn(hidden: torch.Tensor) -> torch.Tensor:
    return scaled(torch.empty_like(hidden).bernoulli_(0.7))


def scaled(mask: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.div_.Scalar(mask, 0.7)  # type: ignore[no-any-return]


def drawn_bools(hidden: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(hidden, 0.3, True)[1]


def indices(hidden: torch.Tensor, beyond: tuple[int, int] = (0, 0)) -> torch.Tensor:
    return nn.functional.pad(hidden.view(-1, 4, 16), beyond, value=-math.inf).argmax(2)


def cast(hidden: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (hidden.to(dtype) * 0.5).float()


def unseen(tensor: torch.Tensor, content: float) -> torch.Tensor:
    """A part of it is written, and no counter tells of that."""
    tensor.data[0] = content
    return tensor


def in_part(mask: torch.Tensor) -> torch.Tensor:
    mask.view(-1)[:10].mul_(3)
    return mask


OTHERWISE: dict[Callable[[torch.Tensor], torch.Tensor], dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    drawn: {
        "filled": lambda hidden: scaled(torch.empty_like(hidden).fill_(1.0)),
        "uniform": lambda hidden: scaled(torch.empty_like(hidden).uniform_()),
        "one more write": lambda hidden: in_part(drawn(hidden)),
        "unseen write": lambda hidden: unseen(drawn(hidden), 5.0),
    },
    drawn_bools: {
        "compared bools": lambda hidden: hidden > 0,
        "written bools": lambda hidden: drawn_bools(hidden).logical_not_(),
        "unseen bools": lambda hidden: unseen(drawn_bools(hidden), 0.0),
    },
    indices: {
        "drawn indices": lambda hidden: torch.randint(64, (len(hidden), 4)),
        "converted indices": lambda hidden: (hidden[:, :4] > 0).long(),
        "indices of another bound": lambda hidden: indices(hidden, (0, 256)),  # planned were bytes
        "written indices": lambda hidden: indices(hidden).bitwise_xor_(1),
        "indices written unseen": lambda hidden: unseen(indices(hidden), 63),
    },
    cast: {
        "written cast": lambda hidden: cast(hidden).mul_(1.001),
        "float16 cast": lambda hidden: cast(hidden, torch.float16),
        "computed cast": lambda hidden: hidden * 0.37,
    },
}
"""What is planned, and what is made otherwise and autograd cannot tell from it."""
PLANNED_AS = {how: planned for planned, others in OTHERWISE.items() for how in others}


@functools.cache
def saving(planned: Callable[[torch.Tensor], torch.Tensor], how: str = "", *, writes: bool = False) -> Case:
    """Saves what is planned, or what is made otherwise; and ``writes`` it then."""
    make = OTHERWISE[planned][how] if how else planned

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        hidden = net.linear(batch)
        if planned is cast:
            return make(hidden).square()
        saved = make(hidden.detach())
        out = hidden.gather(1, saved) if planned is indices else hidden * saved
        if writes:
            saved.add_(1)
        return out  # type: ignore[no-any-return]

    rows = 4096 if planned in (indices, cast) else 256
    case = of(lambda: Net(body, linear=nn.Linear(64, 64)), rows, 64)
    return (Formed if planned in (indices, cast) else Drawn)(case.make)


@pytest.mark.parametrize("how", PLANNED_AS)
@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_what_other_ops_have_made_is_swapped_and_not_narrowed(how: str, decision: Decision) -> None:
    case = saving(PLANNED_AS[how])
    plan, _ = planned(case, held(problem_of(case), decision))
    assert sum(value.bits and value.until >= 0 for value in plan.values) == 1
    assert followed(case, plan).total.fallbacks == 0
    model, loss_of = saving(PLANNED_AS[how], how).make()
    assert gradient_bits(model, loss_of, plan, fallbacks=1) == gradient_bits(model, loss_of)


class OwnDropout(nn.Module):
    """Its mask is that of torch's dropout, or made by other ops, beside ``more`` elements that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.is_own, self.more = nn.Linear(64, 64), nn.Linear(64, 64), False, 0
        self.held: torch.Tensor | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, self.held = self.first(batch), torch.empty(self.more) if self.more else None
        if self.is_own:
            hidden = hidden * ((torch.rand_like(hidden) > 0.3).to(hidden.dtype) / 0.7)
        else:
            hidden = nn.functional.dropout(hidden, 0.3)
        return self.last(hidden.sin()).sin()  # type: ignore[no-any-return]


def test_the_budget_is_kept_or_told_where_a_value_is_swapped_and_not_recomputed() -> None:
    batch = torch.randn(4096, 64)
    case = Drawn(lambda: (OwnDropout(), lambda model: model(batch).square().mean()))
    plan, found = planned(case, held(problem_of(case), KEEP, SWAP))
    plan = msgspec.structs.replace(plan, budget_bytes=found.simulation.peak_bytes)
    model, step, _ = case.fresh()
    for is_own, more in ((False, 0), (True, 0), (True, batch.numel())):
        model.is_own, model.more = is_own, more
        options = {"meter": "always", "quiet": True, "arena": "off"}
        with our_warnings() as told, poochplan.apply(plan, model, **options) as session:  # type: ignore[arg-type]
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                step().backward()  # type: ignore[no-untyped-call]
        assert session.report().total.fallbacks == 2 * is_own
        assert (session.report().last_step.peak_bytes > plan.budget_bytes) is bool(more)
        assert any("more than its budget" in one for one in told) is bool(more)


@pytest.mark.parametrize("made", [drawn, indices])
def test_what_is_written_after_its_save_raises_what_autograd_raises(
    made: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    case = saving(made)
    assert masks_of(case.profile())
    plan, _ = planned(case, held(problem_of(case), KEEP))
    model, loss_of = saving(made, writes=True).make()
    with poochplan.apply(plan, model), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(model).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("decision", Decision)
def test_sources_give_the_bits_of_in_core_training_whatever_is_not_a_number(name: str, decision: Decision) -> None:
    case = CASES[name]
    assert len(sources_of(case.profile())) >= 4
    plan, _ = planned(case, held(problem_of(case), decision))
    model, loss_of = case.make()
    weight = next(model.parameters())
    with torch.no_grad():
        patterns = torch.arange(weight.numel()) * (65536 // weight.numel()) + 3
        weight.copy_(patterns.to(torch.uint16).view(torch.bfloat16).view(weight.shape))
        weight[: len(weight) // 2] = 0.25
    assert gradient_bits(model, loss_of, plan) == gradient_bits(model, loss_of)

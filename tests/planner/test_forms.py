"""Which saved values have narrow forms, and what plans say of these."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from poochplan.formats.forms import CASTING, form_of
from poochplan.formats.narrow import (
    DROPOUT,
    as_planned,
    bits_bytes,
    faster_masks,
    masks_of,
    moved_by_both,
    narrowed,
    with_bits,
)
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Kind, Profile
from poochplan.formats.sources import with_sources
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.writing import with_decisions
from tests.planner.checker import Violation, check
from tests.planner.form_profiles import POOL, cast, on_cuda, pool, with_types
from tests.planner.plans import held
from tests.planner.random_profiles import Recorder, link, with_facts
from tests.planner.test_masks import fused_dropout

COUNT = 16384


def pooled(side: int = 16, count: int = COUNT, is_written: bool = False) -> Profile:
    """A layer, a pool of it, and a layer behind that."""
    r = Recorder()
    (stem,) = r.op("linear", [r.before(4096)], [16 * count], seconds=1.0)
    out, indices = pool(r, stem, count, seconds=0.5, saves=[stem])
    if is_written:
        r.op("add_", [indices], writes=[indices], seconds=0.1, in_graph=False)
    r.op("linear", [out], [512], saves=[out], seconds=1.0)
    return with_types(r.finish(link(1e-3)), side)


def casted(is_written: bool = True, source_lives: bool = False) -> Profile:
    """A layer, and the square of float32 that a cast makes of bfloat16."""
    r = Recorder()
    (stem,) = r.op("linear", [r.before(4096)], [4 * COUNT], seconds=1.0)
    squared = cast(r, stem, COUNT, seconds=0.5, cast_s=0.1, is_written=is_written)
    narrow = next(number for number, value in enumerate(r.values) if value.name.startswith("mul1/"))
    reads = [squared, narrow] if source_lives else [squared]
    r.op("linear", reads, [512], saves=[squared], seconds=1.0)
    return with_types(r.finish(link(1e-3)))


def form(profile: Profile) -> str:
    """That of the only value that has one; empty if none has."""
    return "".join(form_of(profile, value) for value in masks_of(profile).values())


@pytest.mark.parametrize(
    ("side", "expected", "kept_bytes"),
    [(16, "uint8", 1), (17, "uint16", 2), (256, "uint16", 2), (257, "int32", 4), (46340, "int32", 4), (46342, "", 0)],
)
def test_indices_are_as_narrow_as_the_plane_allows(side: int, expected: str, kept_bytes: int) -> None:
    profile = pooled(side)
    assert form(profile) == expected
    for value in masks_of(profile).values():
        assert bits_bytes(profile, value) == kept_bytes * COUNT


def test_the_bound_of_a_view_of_another_shape_is_the_number_of_all_elements() -> None:
    profile = pooled(16)
    assert form(with_facts(profile, "values", profile.ops[1].inputs[0], shape=(300, 256))) == "int32"


@pytest.mark.parametrize(
    ("name", "read", "made", "expected"),
    [
        ("aten.topk.default", (8192, 64), (8192, 2), "uint8"),
        ("aten.topk.default", (3, 300, 64), (3, 20, 64), "uint16"),
        ("aten.max.dim", (70000, 64), (70000,), "uint8"),
        ("aten.min.dim", (70000, 64), (1, 64), "int32"),
        ("aten.sort.default", (1024, 32), (1024, 32), "uint16"),
        ("aten.sort.stable", (100, 32), (100, 32), "uint8"),
        ("aten.sort.stable", (100, 32), (3200,), "uint16"),
        ("aten.other.default", (100, 32), (100, 32), ""),
    ],
)
def test_indices_along_a_dimension_are_as_narrow_as_its_extent(
    name: str, read: tuple[int, ...], made: tuple[int, ...], expected: str
) -> None:
    profile = pooled()
    ops = tuple(replace(op, name=name) if op.name == POOL else op for op in profile.ops)
    (stem, *_), (_, indices) = ops[1].inputs, ops[1].outputs
    found = with_facts(replace(profile, ops=ops), "values", stem, shape=read)
    found = with_facts(found, "values", indices, shape=made)
    assert form(found) == expected
    assert masks_of(with_facts(found, "values", indices, dtype="float32")) == {}  # what is chosen, and not its place


def test_indices_that_are_written_or_small_or_given_have_no_narrow_form() -> None:
    assert masks_of(pooled(is_written=True)) == {}
    assert masks_of(pooled(count=2000)) == {}
    profile = pooled()
    ((_, indices),) = masks_of(profile).items()
    for facts in ({"kind": Kind.INPUT}, {"pinned": "as for this test"}, {"nodes": ("0/pool",)}, {"dtype": "int32"}):
        assert masks_of(with_facts(profile, "values", indices, **facts)) == {}
    first = profile.ops[1].outputs[::-1]  # the first result of a pool is no index
    assert masks_of(with_facts(profile, "ops", 1, outputs=first)) == {}


def test_a_cast_has_upper_halves_if_no_plan_can_hold_its_source() -> None:
    assert form(casted()) == form(casted(is_written=False)) == "bfloat16"
    held = casted(is_written=False, source_lives=True)
    assert len(with_sources(held).points) == len(held.points) + 1
    assert masks_of(held) == masks_of(with_sources(held)) == {}
    written = casted(source_lives=True)
    assert form(written) == "bfloat16"


@pytest.mark.parametrize(
    ("place", "facts"),
    [("inputs", {"dtype": "float16"}), ("outputs", {"dtype": "bfloat16"}), ("inputs", {"born": -1})],
)
def test_casts_of_other_types_or_of_what_was_there_before_have_no_upper_halves(
    place: str, facts: dict[str, Any]
) -> None:
    profile = casted()
    (value,) = getattr(profile.ops[2], place)
    assert masks_of(with_facts(profile, "values", value, **facts)) == {}


def test_what_is_made_again_in_less_time_has_no_narrow_form() -> None:
    profile = casted()
    assert len(faster_masks(profile)) == 1
    ops = tuple(replace(op, duration_s=1e-6) if op.name == "mul" else op for op in profile.ops)
    assert faster_masks(replace(profile, ops=ops)) == {}


FORMS = {
    "integers of indices": (pooled(), pooled(64), pooled(512), on_cuda(pooled())),
    "upper halves of casts": (casted(), on_cuda(casted())),
    "bits of masks": (fused_dropout(), on_cuda(fused_dropout())),
}
"""By their rows in a plan's table."""


@pytest.mark.parametrize("profile", [*FORMS["integers of indices"], *FORMS["upper halves of casts"]])
def test_a_narrow_form_is_the_only_recipe_of_a_value_and_is_never_recomputed(profile: Profile) -> None:
    planned = with_bits(profile)
    assert with_bits(planned) is planned
    ((narrow, whole),) = narrowed(planned).items()
    problem = build_problem(planned)
    place = problem.replay.value_of.index(whole)
    assert problem.replay.replays[place - 1] is None
    assert problem.replay.of(place).inputs == (place - 1,)
    assert moved_by_both(profile, whole) == 2 * (profile.values[whole].size_bytes + planned.values[narrow].size_bytes)
    assert not any(op.workspace_bytes for op in planned.ops)
    assert not any(value.name.startswith("tables") for value in planned.values)


@pytest.mark.parametrize(("row", "profile"), [(row, one) for row, profiles in FORMS.items() for one in profiles])
def test_a_checked_plan_holds_the_forms_of_what_the_right_ops_have_made(
    row: str, profile: Profile, tmp_path: Any
) -> None:
    made = held(profile, with_bits)
    place = next(number for number, value in enumerate(made.values) if value.bits)
    swapped = with_decisions(profile, made, {made.values[place].name: "swap"})
    for one in (made, swapped):
        assert check(profile, one).peak_bytes == one.prediction.peak_bytes
        assert Plan.load(one.save(tmp_path / "plan.json", force=True)) == one
    assert as_planned(profile, made) == with_bits(profile)
    assert [one for one in made.rows() if one in FORMS] == [row]
    makers = (POOL, CASTING, DROPOUT)
    ops = tuple(replace(op, name="aten.other.default" if op.name in makers else op.name) for op in profile.ops)
    with pytest.raises(Violation, match=r"other.default makes no"):
        check(replace(profile, ops=ops), made)
    with pytest.raises(Violation, match=" as "):
        check(profile, with_facts(made, "values", place, decision=Decision.RECOMPUTE))

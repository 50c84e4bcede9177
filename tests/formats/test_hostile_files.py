"""A plan or profile with any one field changed is refused by one line, or is carried out with the right gradients."""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import InputFileError, PoochError, SpillError, UsageError
from poochplan.formats.plan import Plan, PointActions
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan
from poochplan.planner.problem.validate import check_profile
from poochplan.planner.writing import with_decisions
from poochplan.report.inspection.file_rows import plan_file_data, plan_file_rows, profile_file_data, profile_file_rows
from tests.depth import DEEP
from tests.docs.prose import ROOT
from tests.formats.mutations import Mutation, mutations
from tests.runtime.nets import LINK

SHARE = 1 if DEEP else 8
"""One of so many mutations is tried, drawn anew for each field and value."""
NAMED = re.compile(r"at `\$|\w(\[\d+\])?: expected|missing required field|not JSON|schema|kind")
"""A message that says where."""


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.LayerNorm(64)), torch.randn(512, 64)


def gradients(given: Plan | None, steps: int = 1) -> list[torch.Tensor]:
    model, batch = network()
    found: list[torch.Tensor] = []

    def train() -> None:
        for _ in range(steps):
            model.zero_grad()
            model(batch).square().mean().backward()
            found.extend(parameter.grad.clone() for parameter in model.parameters())

    if given is None:
        train()
        return found
    with poochplan.apply(given, model, arena="auto" if steps > 1 else "off"):
        train()
    return found


@pytest.fixture(scope="module")
def profile() -> Profile:
    model, batch = network()
    return poochplan.profile(lambda: model(batch).square().mean(), model=model, iterations=1, link=LINK)


@pytest.fixture(scope="module")
def whole(profile: Profile) -> Plan:
    """A plan that swaps and recomputes, with a layout."""
    made = plan(profile, "75%", policy="superneurons")
    moved = [value.name for value in made.values if value.decision != "keep"]
    made = with_decisions(profile, made, dict.fromkeys(moved[::2], "swap"))
    assert {value.decision for value in made.values} == {"keep", "swap", "recompute"}
    assert made.layout is not None
    return made


def chosen(document: dict[str, Any]) -> Iterator[Mutation]:
    chance = random.Random(1)
    return (one for one in mutations(document) if chance.random() < 1 / SHARE)


def carried_out(given: Plan, mutation: Mutation, expected: list[torch.Tensor]) -> None:
    """Shown, and followed for a step; for several where steps may be served from an arena."""
    plan_file_rows(given), plan_file_data(given)
    steps = 4 if any("arena" in str(step) or step == "layout" for step in mutation.path) else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradients(given, steps)
    assert len(found) == steps * len(expected) // 4
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=False)), mutation


def fate(path: Path, mutation: Mutation, expected: list[torch.Tensor]) -> str:
    """What became of a file: refused when read, refused later, or right."""
    stage = "read"
    path.write_bytes(mutation.text)
    try:
        if path.stem == "plan":
            read = Plan.load(path)
        else:
            profile = Profile.load(path)
            stage = "later"
            profile_file_rows(profile), profile_file_data(profile)
            read = plan(profile, "80%", policy="swap-all")
        stage = "later"
        carried_out(read, mutation, expected)
    except PoochError as error:
        said = str(error)
        assert "\n" not in said, mutation
        assert len(said) < 2000, mutation
        if stage == "read":
            assert said.startswith(str(path)), mutation
            assert NAMED.search(said), said
        return f"refused, {stage}"
    return "right"


@pytest.mark.parametrize("kind", ["plan", "profile"])
def test_any_field_changed_is_refused_by_one_line_or_carried_out_right(
    kind: str, profile: Profile, whole: Plan, tmp_path: Path
) -> None:
    path = (whole if kind == "plan" else profile).save(tmp_path / f"{kind}.json")
    expected = gradients(None, 4)
    fates = Counter(fate(path, mutation, expected) for mutation in chosen(json.loads(path.read_bytes())))
    assert fates["refused, read"] >= 150
    assert fates["right"] >= 20
    assert sum(fates.values()) >= 200


def test_files_that_nothing_was_done_to_load(profile: Profile, whole: Plan, tmp_path: Path) -> None:
    assert Profile.load(profile.save(tmp_path / "profile.json.gz")) == profile
    assert Plan.load(whole.save(tmp_path / "plan.json.gz")) == whole


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "instances").glob("*.json.gz")), ids=lambda path: path.name
)
def test_committed_profiles_are_sound(path: Path) -> None:
    check_profile(Profile.load(path))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "launch_plans").glob("*.gz")), ids=lambda path: path.name
)
def test_committed_plans_are_sound(path: Path) -> None:
    Plan.load(path)


# -- what takes more than one field ------------------------------------------------------------------------------------


def changed(path: Path, given: Plan, **changes: object) -> Path:
    return msgspec.structs.replace(given, **changes).save(path, force=True)


def swapped(given: Plan) -> int:
    return next(index for index, value in enumerate(given.values) if value.decision == "swap")


def test_a_plan_that_swaps_more_than_the_disk_has_is_refused_before_anything_is_written(
    whole: Plan, tmp_path: Path
) -> None:
    values, place = list(whole.values), swapped(whole)
    values[place] = msgspec.structs.replace(values[place], size_bytes=1 << 47, host_offset=0)
    kept = tuple(
        one if index == place else msgspec.structs.replace(one, decision="keep", host_offset=-1)
        for index, one in enumerate(values)
    )
    prediction = msgspec.structs.replace(whole.prediction, step_s=1e6)
    huge = changed(tmp_path / "plan.json", whole, values=kept, schedule=(), prediction=prediction)
    before = shutil.disk_usage(tmp_path).free
    with pytest.raises(SpillError, match=r"expected 128 TiB for what the plan swaps, found .* free; free space"):
        gradients(Plan.load(huge))
    assert before - shutil.disk_usage(tmp_path).free < 1 << 30


def test_two_values_in_one_place_on_the_host_are_refused(whole: Plan, tmp_path: Path) -> None:
    values, place = list(whole.values), swapped(whole)
    other = next(index for index, value in enumerate(values) if index != place and value.decision != "swap")
    size_bytes = values[place].size_bytes
    values[other] = msgspec.structs.replace(
        values[other], decision="swap", host_offset=values[place].host_offset, size_bytes=size_bytes
    )
    path = changed(tmp_path / "plan.json", whole, values=tuple(values), schedule=())
    with pytest.raises(InputFileError, match=r"values\[\d+\].host_offset: expected a place of its own, found one in"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            [("save", {"release": 0})],
            "expected release of value {swap} once, after its swap_out, found it after nothing",
        ),
        ([("last", {"swap_out": 0, "prefetch": 0})], "expected prefetch of value {swap} once, after its release"),
        ([("last", {"swap_out": 0}), ("use", {"swap_out": 0})], "expected swap_out of value {swap} once, first, found"),
        ([("use", {"replay": 0})], "expected a value whose decision is recompute, found swap"),
        ([("use", {}), ("save", {})], "expected points in the order of the clock, found save 0 too late"),
        ([("save", {"swap_out": 1})], "expected one of 1 values that are saved by then, found 1"),
    ],
)
def test_a_schedule_that_nothing_could_follow_is_refused(
    schedule: list[tuple[str, dict[str, int]]], message: str, whole: Plan, tmp_path: Path
) -> None:
    """Values are counted from the one that is swapped, which is saved at ``last``."""
    first = swapped(whole)
    places = {"save": ("save", 0), "last": ("save", len(whole.values) - 1), "use": ("use", 0)}
    made = tuple(
        PointActions(
            at=places[where][0],  # type: ignore[arg-type]
            index=places[where][1],
            **{name: (value if "saved by then" in message else first,) for name, value in actions.items()},  # type: ignore[arg-type]
        )
        for where, actions in schedule
    )
    if "release of" in message:
        made = (msgspec.structs.replace(made[0], index=first),)
    with pytest.raises(InputFileError, match=re.escape(message.format(swap=first))):
        Plan.load(changed(tmp_path / "plan.json", whole, schedule=made))


def test_a_throttle_under_which_a_step_would_never_end_is_refused(whole: Plan, tmp_path: Path) -> None:
    link = msgspec.structs.replace(whole.link, throttle_bytes_per_s=1.0)
    with pytest.raises(InputFileError, match="link: expected rates at which what is swapped goes out in about"):
        Plan.load(changed(tmp_path / "plan.json", whole, link=link))


def test_a_dtype_that_torch_has_not_is_refused_when_it_is_applied(whole: Plan, tmp_path: Path) -> None:
    for name in ("float128", "load", "__class__"):
        values = (msgspec.structs.replace(whole.values[0], dtype=name), *whole.values[1:])
        with pytest.raises(UsageError, match=rf"values\[0\]\.dtype: expected a dtype of torch .*, found '{name}'"):
            gradients(Plan.load(changed(tmp_path / "plan.json", whole, values=values)))

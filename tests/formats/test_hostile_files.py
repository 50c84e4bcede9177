"""A plan or profile with any one field changed is refused by one line, or is carried out with the right gradients."""

from __future__ import annotations

import json
import os
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
from poochplan.errors import InputFileError, PoochError, UsageError
from poochplan.formats.files import cache_folder, write_cache
from poochplan.formats.pass_profile import PassBlock, PassProfile
from poochplan.formats.plan import Departure, Plan, PointActions
from poochplan.formats.profile import Device, ModelSignature, Profile
from poochplan.formats.run_record import RunRecord
from poochplan.planner.planning import plan
from poochplan.planner.writing import with_decisions
from poochplan.profiler import link as link_module
from poochplan.report.tables import file_data, file_rows, load_any
from poochplan.runtime.devices.cpu import SpillFile
from poochplan.workload import parse_override, read_workload_file
from tests.depth import DEEP
from tests.formats.mutations import Mutation, mutations
from tests.processes import ROOT
from tests.runtime.nets import equal, in_core, of, train

SHARE = 1 if DEEP else 12
"""One of so many mutations is tried, drawn anew for each field and value."""
NAMED = re.compile(r"at `\$|\w(\[\d+\])?: expected|missing required field|not JSON|schema|kind")
"""A message that says where."""


def layers() -> nn.Module:
    of_three = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*of_three, nn.LayerNorm(64))


NETWORK = of(layers, 512, 64)


def steps_under(given: Plan, steps: int = 1) -> list[list[torch.Tensor]]:
    """What is left by each step that follows the plan."""
    return train(NETWORK, steps, given, arena="auto" if steps > 1 else "off")[0]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return NETWORK.profile()


@pytest.fixture(scope="module")
def whole(profile: Profile) -> Plan:
    """A plan that swaps and recomputes, with a layout."""
    made = plan(profile, "60%", policy="swap-all")
    moved = [value.name for value in made.values if value.decision != "keep"]
    made = with_decisions(profile, made, dict.fromkeys(moved[::3], "recompute"))
    assert {value.decision for value in made.values} == {"keep", "swap", "recompute"}
    assert made.layout is not None
    return made


def chosen(document: dict[str, Any]) -> Iterator[Mutation]:
    chance = random.Random(1)
    return (one for one in mutations(document) if chance.random() < 1 / SHARE)


def carried_out(given: Plan, mutation: Mutation) -> None:
    """Shown, and followed for a step; for several where steps may be served from an arena."""
    file_rows(given), file_data(given)
    steps = 4 if any("arena" in str(step) or step == "layout" for step in mutation.path) else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert equal(steps_under(given, steps), in_core(NETWORK, 4)[:steps]), mutation


def fate(path: Path, mutation: Mutation) -> str:
    """What became of a file: refused when read, refused later, or right."""
    stage = "read"
    path.write_bytes(mutation.text)
    try:
        if path.stem == "plan":
            read = Plan.load(path)
        else:
            profile = Profile.load(path)
            stage = "later"
            file_rows(profile), file_data(profile)
            read = plan(profile, "80%", policy="swap-all")
        stage = "later"
        carried_out(read, mutation)
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
    fates = Counter(fate(path, mutation) for mutation in chosen(json.loads(path.read_bytes())))
    assert fates["refused, read"] >= 100
    assert fates["right"] >= 15
    assert sum(fates.values()) >= 150, fates


def test_files_that_nothing_was_done_to_load(profile: Profile, whole: Plan, tmp_path: Path) -> None:
    assert Profile.load(profile.save(tmp_path / "profile.json.gz")) == profile
    assert Plan.load(whole.save(tmp_path / "plan.json.gz")) == whole


def test_committed_plans_are_sound() -> None:
    for path in (ROOT / "benchmarks" / "launch_plans").glob("*.gz"):
        Plan.load(path)


# -- what takes more than one field ------------------------------------------------------------------------------------


def changed(folder: Path, given: Plan, **changes: object) -> Path:
    return msgspec.structs.replace(given, **changes).save(folder / "plan.json", force=True)


def refused(folder: Path, given: Plan, message: str, **changes: object) -> None:
    with pytest.raises(InputFileError, match=message):
        Plan.load(changed(folder, given, **changes))


def swapped(given: Plan) -> int:
    return next(index for index, value in enumerate(given.values) if value.decision == "swap")


def test_of_a_plan_that_swaps_more_than_the_disk_has_nothing_is_written_ahead_and_a_line_says_so(
    whole: Plan, tmp_path: Path
) -> None:
    values, place = list(whole.values), swapped(whole)
    values[place] = msgspec.structs.replace(values[place], size_bytes=1 << 47, host_offset=0)
    kept = tuple(
        one if index == place else msgspec.structs.replace(one, decision="keep", host_offset=-1)
        for index, one in enumerate(values)
    )
    prediction = msgspec.structs.replace(whole.prediction, step_s=1e6)
    huge = changed(tmp_path, whole, values=kept, schedule=(), prediction=prediction)
    before = shutil.disk_usage(tmp_path).free
    with pytest.warns(RuntimeWarning, match=r"no room for .* of swapped values \(No space left .* stay on the device"):
        steps_under(Plan.load(huge))
    assert before - shutil.disk_usage(tmp_path).free < 1 << 30


def test_a_spill_file_grows_by_no_more_than_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, usage = SpillFile(tmp_path), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    file.write_ahead(1 << 20)
    with pytest.raises(OSError, match=r"No space left on device: 1.00 MiB in "):
        file.write_ahead(3 << 20)
    assert os.fstat(file.descriptor).st_size == 1 << 20
    file.write_ahead(2 << 20)
    file.close()


def test_two_values_in_one_place_on_the_host_are_refused(whole: Plan, tmp_path: Path) -> None:
    values, place = list(whole.values), swapped(whole)
    other = next(index for index, value in enumerate(values) if index != place and value.decision != "swap")
    size_bytes = values[place].size_bytes
    values[other] = msgspec.structs.replace(
        values[other], decision="swap", host_offset=values[place].host_offset, size_bytes=size_bytes
    )
    message = r"values\[\d+\].host_offset: expected a place of its own, found one in"
    refused(tmp_path, whole, message, values=tuple(values), schedule=())


SCHEDULES: list[tuple[list[tuple[str, dict[str, int]]], str]] = [
    ([("save", {"release": 0})], "expected release of value {swap} once, after its swap_out, found it after nothing"),
    ([("last", {"swap_out": 0, "prefetch": 0})], "expected prefetch of value {swap} once, after its release"),
    ([("last", {"swap_out": 0}), ("use", {"swap_out": 0})], "expected swap_out of value {swap} once, first, found"),
    ([("use", {"replay": 0})], "expected a value whose decision is recompute, found swap"),
    ([("use", {}), ("save", {})], "expected points in the order of the clock, found save 0 too late"),
    ([("save", {"swap_out": 1})], "expected one of 1 values that are saved by then, found 1"),
]


@pytest.mark.parametrize(("schedule", "message"), SCHEDULES)
def test_a_schedule_that_nothing_could_follow_is_refused(
    schedule: list[tuple[str, dict[str, int]]], message: str, whole: Plan, tmp_path: Path
) -> None:
    """Values are counted from the one that is swapped, which is saved at ``last``."""
    first = swapped(whole)
    places = {"save": ("save", 0), "last": ("save", len(whole.values) - 1), "use": ("use", 0)}
    made = []
    for where, actions in schedule:
        at, index = places[where]
        named = {name: (value if "saved by then" in message else first,) for name, value in actions.items()}
        made.append(PointActions(at=at, index=index, **named))  # type: ignore[arg-type]
    if "release of" in message:
        made = [msgspec.structs.replace(made[0], index=first)]
    refused(tmp_path, whole, re.escape(message.format(swap=first)), schedule=tuple(made))


def test_a_throttle_under_which_a_step_would_never_end_is_refused(whole: Plan, tmp_path: Path) -> None:
    link = msgspec.structs.replace(whole.link, throttle_bytes_per_s=1.0)
    refused(tmp_path, whole, "link: expected rates that copy all swapped bytes out in about", link=link)


def test_a_dtype_that_torch_has_not_is_refused_when_it_is_applied(whole: Plan, tmp_path: Path) -> None:
    for name in ("float128", "load", "__class__"):
        values = (msgspec.structs.replace(whole.values[0], dtype=name), *whole.values[1:])
        with pytest.raises(UsageError, match=rf"values\[0\]\.dtype: expected a dtype of torch .*, found '{name}'"):
            steps_under(Plan.load(changed(tmp_path, whole, values=values)))


# -- other files -----------------------------------------------------------------------------------------------------

RUN = RunRecord(
    workload="small", plan_fingerprint="0", versions={"torch": "2"}, in_core_peak_bytes=8, budget_bytes=8,
    predicted_peak_bytes=8, measured_peak_bytes=8, in_core_step_s=1.0, in_core_step_measured=True,
    predicted_step_s=1.0, planned_step_s=1.0, predicted_overhead=0.0, measured_overhead=0.0, out_bytes=0, in_bytes=0,
    replay_s=0.0, replayed_values=0, stall_s=0.0, contradiction="", fallbacks=1, fallback_reasons=("none",),
    departures=(Departure(at="save", index=0, layer="", value="", planned="", found=""),), bitwise_equal=True,
    difference=None, allocated_peak_bytes=None, reserved_peak_bytes=None, arena_bytes=None, arena_live_bytes=None,
)  # fmt: skip
PASS = PassProfile(
    workload="small", device=Device(kind="cpu", name="cpu", memory_bytes=1 << 30), versions={},
    model=ModelSignature(fingerprint="0", tensors=("weight float32[8]",)), inputs=("0 float32[8, 3]",), calls=1,
    pass_s=1.0, spread_s=0.0, iterations=1, static_bytes={"parameter": 32}, live_peak_bytes=8, allocated_peak_bytes=8,
    total_bytes=8, arena_bytes=8, arena_live_bytes=8, separate_bytes=8, outside_bytes=0, caching_bytes=8,
    blocks=(PassBlock(8, 0, 1, 0, ""), PassBlock(8, 1, 2, 0, "")),
)  # fmt: skip


@pytest.mark.parametrize("whole", [RUN, PASS], ids=["run", "pass"])
def test_any_field_of_a_run_or_a_pass_changed_is_refused_by_one_line_or_shown(
    whole: RunRecord | PassProfile, tmp_path: Path
) -> None:
    path = whole.save(tmp_path / "file.json")
    assert load_any(path) == whole
    fates = Counter[bool]()
    for mutation in mutations(json.loads(path.read_bytes())):
        path.write_bytes(mutation.text)
        try:
            found = load_any(path)
            file_rows(found)
            fates[True] += 1
        except PoochError as error:
            said = str(error)
            fates[False] += 1
            assert (path.name in said, "\n" in said) == (True, False)
    assert min(fates.values()) > 50


def test_blocks_of_a_pass_outside_its_arena_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pass.json"
    for block, message in (
        (PassBlock(8, 0, 1, 512, ""), "found 8 bytes at 512"),
        (PassBlock(8, 1, 1, 0, ""), "expected an end behind its start, found 1 and 1"),
    ):
        msgspec.structs.replace(PASS, blocks=(block,)).save(path, force=True)
        with pytest.raises(InputFileError, match=rf"blocks\[0\]: .*{message}"):
            load_any(path)


@pytest.mark.parametrize("text", ["1 2", "9" * 5000, "-3", "8, x"])
def test_inputs_that_no_signature_has_are_refused_before_a_set_is_made(text: str, whole: Plan, tmp_path: Path) -> None:
    path = changed(tmp_path, whole, inputs=(f"0 float32[{text}]",))
    with pytest.raises(InputFileError, match=r"Expected `str` .* - at `\$.inputs\[0\]`, found '0 float32"):
        poochplan.PlanSet.load(path)


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "1" * 5000, "{a=" * 3000 + "1" + "}" * 3000])
def test_a_workload_file_with_absurd_values_is_one_clear_error(value: str, tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    path.write_text(f'workload = "a.b:c"\n[parameters]\nwidth = {value}\n')
    with pytest.raises(UsageError, match="not valid TOML: ") as caught:
        read_workload_file(path)
    assert len(str(caught.value)) < 1000
    assert parse_override(value) == value


def test_a_link_or_cost_in_a_cache_that_cannot_be_is_measured_anew(
    whole: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_folder() / "links.json"
    for rate, is_known in ((1e9, True), (0.0, False), (-1.0, False), (1e300, False)):
        outward = msgspec.structs.replace(whole.link.outward, bandwidth_bytes_per_s=rate)
        links = {"here": msgspec.structs.replace(whole.link, outward=outward)}
        write_cache(path, msgspec.json.encode(link_module.CachedLinks(version=link_module.VERSION, links=links)))
        assert bool(link_module._load()) == is_known

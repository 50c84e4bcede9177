"""Files of earlier releases still load; ``data/`` holds what version 1 wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poochplan.errors import InputFileError
from poochplan.formats.plan import SCHEMA_VERSION, Decision, Plan
from poochplan.formats.profile import Phase, Profile
from poochplan.planner.planning import plan, smallest_budget

DATA = Path(__file__).parent / "data"


def test_a_profile_of_version_1_loads_and_is_planned_from() -> None:
    profile = Profile.load(DATA / "profile-v1.json")
    assert (profile.workload, len(profile.ops), profile.in_core_peak_bytes) == ("small", 59, 3514880)
    assert plan(profile, profile.in_core_peak_bytes).prediction.peak_bytes <= profile.in_core_peak_bytes
    assert smallest_budget(profile) == 1678848
    assert profile.runtime is not None
    assert profile.runtime.handle_s > 0
    assert (profile.runtime.launch_s, profile.runtime.replay_s, profile.runtime.unmeasured) == (0.0, 0.0, ())


def test_a_plan_of_version_1_loads_with_all_that_the_runtime_does(tmp_path: Path) -> None:
    loaded = Plan.load(DATA / "plan-v1.json")
    again = Plan.load(loaded.save(tmp_path / "plan.json"))
    assert (loaded.schema_version, again.schema_version) == (1, SCHEMA_VERSION)
    assert again == msgspec.structs.replace(loaded, schema_version=SCHEMA_VERSION)
    what_to_do = loaded.instructions
    assert [value.decision for value in what_to_do.values].count(Decision.SWAP) == 6
    assert (what_to_do.values, what_to_do.schedule) == (loaded.values, loaded.schedule)
    assert (what_to_do.handles, what_to_do.uses) == (loaded.handles, loaded.uses)
    assert what_to_do.record_from_start == loaded.record_from_start
    assert (loaded.versions, loaded.host, loaded.solve.evaluations, loaded.solve.seed) == ({}, None, None, 0)


def test_what_was_not_written_yet_is_none_in_what_is_read(tmp_path: Path) -> None:
    made, data = (msgspec.json.decode((DATA / f"{kind}-v1.json").read_bytes()) for kind in ("plan", "profile"))
    del made["inputs"], made["prediction"]["arena_bytes"], made["prediction"]["arena_live_bytes"]
    del data["layer_times"], data["link"]["pageable_out"], data["link"]["pageable_in"]
    for phase in Phase:
        del data["times"][f"{phase}_spread_s"]
    for op in data["ops"]:
        op.pop("spread_s", None)
    for kind, content in (("plan", made), ("profile", data)):
        (tmp_path / f"{kind}.json").write_bytes(msgspec.json.encode(content))
    loaded, profile = Plan.load(tmp_path / "plan.json"), Profile.load(tmp_path / "profile.json")
    assert (loaded.inputs, loaded.prediction.arena_bytes, loaded.rows().get("arena")) == ((), None, None)
    assert (profile.layer_times, profile.link.pageable_in, profile.times.forward_spread_s) == ((), None, 0.0)
    assert profile.to_frame("ops")["spread_s"].sum() == 0
    assert profile.to_frame("layers")[["forward_median_s", "backward_spread_s"]].isna().all(axis=None)


def test_what_the_runtime_takes_is_in_the_step_of_a_plan_that_said_it_beside() -> None:
    on_disk = msgspec.json.decode((DATA / "plan-v1.json").read_bytes())["prediction"]
    found = Plan.load(DATA / "plan-v1.json").prediction
    assert on_disk["runtime_s"] > 0
    assert found.step_s == on_disk["step_s"] + on_disk["runtime_s"]
    assert found.overhead == found.step_s / found.in_core_step_s - 1


def test_a_plan_that_holds_a_value_in_a_narrow_form_is_refused_and_others_of_its_version_load(tmp_path: Path) -> None:
    made: dict[str, Any] = msgspec.json.decode((DATA / "plan-v1.json").read_bytes()) | {"schema_version": 9}
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(made))
    assert Plan.load(path).instructions == Plan.load(DATA / "plan-v1.json").instructions
    made["values"][1]["bits"] = True
    path.write_bytes(msgspec.json.encode(made))
    message = "plan.json: not a valid plan: Object contains unknown field `bits` - at `$.values[1]`"
    with pytest.raises(InputFileError, match=re.escape(message) + ".*; make it again with `pooch plan`$"):
        Plan.load(path)


def test_a_profile_with_costs_and_kernels_that_no_plan_has_any_more_loads(tmp_path: Path) -> None:
    made: dict[str, Any] = msgspec.json.decode((DATA / "profile-v1.json").read_bytes())
    made["device"]["bits_kernel"], made["runtime"]["narrow_s"] = True, 1e-6
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(made))
    assert Profile.load(tmp_path / "profile.json") == Profile.load(DATA / "profile-v1.json")

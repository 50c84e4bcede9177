"""What a profile becomes on another machine, and what plans made from it say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from poochplan.errors import InfeasibleError, UsageError
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.profile import PRESET_BYTES_PER_S, Profile, preset_link
from poochplan.formats.profile_parts import RuntimeCost
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.whatif import for_machine, parse_link
from tests.planner.random_profiles import resnet_like, transformer_like


@pytest.fixture(scope="module")
def profile() -> Profile:
    return transformer_like(2, link_gb_per_s=0.5)


def test_without_a_change_the_profile_is_itself(profile: Profile) -> None:
    assert for_machine(profile) is profile
    assert for_machine(profile, link="measured") is profile
    assert for_machine(profile, compute_scale=1.0) is profile


@pytest.mark.parametrize("name", PRESET_BYTES_PER_S)
def test_a_presets_name_is_its_link(profile: Profile, name: str) -> None:
    changed = for_machine(profile, link=name)
    assert changed.link == preset_link(name)
    assert any(name in text for text in changed.assumed)


@pytest.mark.parametrize(
    ("text", "out", "back"),
    [("12GB/s", 12e9, 12e9), ("12GB/s,25GB/s", 12e9, 25e9), ("400 MB/s", 4e8, 4e8), (3e9, 3e9, 3e9), ("1e9", 1e9, 1e9)],
)
def test_a_rate_is_a_link_of_that_rate_out_and_in(text: str | float, out: float, back: float) -> None:
    link = parse_link(text)
    assert (link.outward.bandwidth_bytes_per_s, link.inward.bandwidth_bytes_per_s) == (out, back)
    assert (link.duplex, link.interference_out, link.interference_in, link.throttle_bytes_per_s) == (
        1.0,
        0.0,
        0.0,
        None,
    )


@pytest.mark.parametrize(
    "text", ["pcie9", "", "0GB/s", 0, -1.0, "-12GB/s", "1GB/s,", "1,2,3", "12GB/s,fast", "nan", "inf"]
)
def test_a_link_that_cannot_be_read_lists_the_presets(text: str | float) -> None:
    with pytest.raises(UsageError, match=r"^link: expected pcie3, .*found") as caught:
        parse_link(text)
    assert "\n" not in str(caught.value)


def test_a_compute_scale_of_a_half_takes_half_the_time_of_everything_and_no_memory(profile: Profile) -> None:
    fast = for_machine(profile, compute_scale=0.5)
    assert [op.duration_s for op in fast.ops] == [op.duration_s * 0.5 for op in profile.ops]
    assert fast.times.step_s == profile.times.step_s * 0.5
    assert fast.times.forward_s == profile.times.forward_s * 0.5
    assert plan(fast, "100%").prediction.in_core_step_s == pytest.approx(
        0.5 * plan(profile, "100%").prediction.in_core_step_s
    )
    assert smallest_budget(fast) == smallest_budget(profile)
    assert (fast.link, fast.values, fast.points) == (profile.link, profile.values, profile.points)
    assert fast.device.name == f"{profile.device.name} (x0.5)"


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_factor_is_refused(profile: Profile, scale: float) -> None:
    with pytest.raises(UsageError, match="compute scale: expected a factor above 0"):
        for_machine(profile, compute_scale=scale)


def test_a_faster_device_hides_less_behind_compute() -> None:
    profile = resnet_like(3, link_gb_per_s=2)
    devices = [for_machine(profile, compute_scale=scale) for scale in (1.0, 0.2, 0.05)]
    overheads = [plan(device, "50%", evaluations=300).prediction.overhead for device in devices]
    assert overheads == sorted(overheads)
    assert overheads[0] < overheads[-1]


def test_the_device_says_its_other_memory(profile: Profile) -> None:
    changed = for_machine(profile, device_memory="16GiB")
    assert changed.device.memory_bytes == 16 << 30
    assert "16.0 GiB" in changed.device.name
    assert changed.ops is profile.ops


def test_memory_that_does_not_hold_what_is_always_live_names_the_smallest_budget(profile: Profile) -> None:
    profile = msgspec.structs.replace(profile, static_bytes={"parameter": 6000, "input": 2000, "gradient": 500})
    static = sum(static_bytes(profile).values())
    assert static == 8000, "gradients do not live through forward in this profile"
    for_machine(profile, device_memory=static + 1)
    with pytest.raises(InfeasibleError, match=f"more than the {static} bytes") as caught:
        for_machine(profile, device_memory=static)
    assert caught.value.smallest_budget_bytes == smallest_budget(profile)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"link": "pcie3"}, {"device_memory": "1GiB"}, {"compute_scale": 2.0}])
def test_a_plan_for_another_machine_is_an_estimate_and_says_what_was_assumed(
    profile: Profile, change: dict[str, Any]
) -> None:
    measured, assumed = plan(profile, "80%"), plan(for_machine(profile, **change), "80%")
    assert (measured.estimate, measured.assumed) == (False, ())
    assert assumed.estimate
    assert len(assumed.assumed) == 1


def test_changes_add_up_and_are_read_back_from_a_file(profile: Profile, tmp_path: Any) -> None:
    changed = for_machine(for_machine(profile, link="12GB/s,25GB/s"), compute_scale=0.5, device_memory="1GiB")
    assert len(changed.assumed) == 3
    assert changed.link.inward.bandwidth_bytes_per_s == 25e9
    assert Profile.load(changed.save(tmp_path / "other.json")) == changed


def test_a_step_that_no_arena_serves_pays_the_launching_thread_as_any_other_does(profile: Profile) -> None:
    replace = msgspec.structs.replace
    cost = RuntimeCost(handle_s=1e-5, swap_s=8e-5, record_s=1e-5)
    times = replace(profile.times, unserved_step_s=1.25 * profile.times.step_s)
    slower = Problem.of(replace(profile, times=times, runtime=cost), has_arena=False).profile
    assert slower.times.step_s == times.unserved_step_s
    assert slower.runtime == cost

"""The frames of a profile add up to it, and say what swapping and recomputing would cost where that can be."""

from __future__ import annotations

import inspect
import re
from typing import get_args, get_type_hints

import msgspec
import pandas as pd
import pytest
import torch

from poochplan.errors import UsageError
from poochplan.formats.profile import Kind, Phase, PointKind, Profile
from poochplan.formats.queries import FRAMES, OUTSIDE
from tests.planner.random_profiles import with_facts
from tests.processes import python
from tests.runtime.nets import LINK, Residual, taken


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    model, images = Residual(), torch.randn(4, 8, 12, 12)
    return taken(lambda: model(images).square().mean(), model)


def seconds(profile: Profile, *phases: Phase) -> float:
    return sum(op.duration_s for op in profile.ops if op.phase in phases)


def test_the_layers_add_up_to_the_profile(profile: Profile) -> None:
    frame = profile.to_frame("layers")
    saved = {profile.handles[point.handle].value for point in profile.points if point.kind is PointKind.SAVE}
    assert frame["saved_bytes"].sum() == sum(profile.values[value].size_bytes for value in saved)
    assert frame["values"].sum() == len(saved)
    free = [value for value in saved if not profile.values[value].pinned]
    assert frame["free_bytes"].sum() == sum(profile.values[value].size_bytes for value in free)
    assert frame["forward_s"].sum() == pytest.approx(seconds(profile, Phase.FORWARD))
    assert frame["backward_s"].sum() == pytest.approx(seconds(profile, Phase.BACKWARD))
    assert frame["forward_s"].sum() == pytest.approx(profile.times.forward_s)
    per_byte_s = sum(1 / way.bandwidth_bytes_per_s for way in (LINK.outward, LINK.inward))
    latency_s = LINK.outward.latency_s + LINK.inward.latency_s
    assert frame["swap_s"].sum() == pytest.approx(len(free) * latency_s + frame["free_bytes"].sum() * per_byte_s)
    assert frame["saved_bytes"].is_monotonic_decreasing
    outside = [op.duration_s for op in profile.ops if not op.layer and op.phase is Phase.FORWARD]
    assert frame.loc[OUTSIDE, "forward_s"] == pytest.approx(sum(outside))
    assert outside


def test_a_link_that_is_held_to_a_rate_swaps_at_that_rate(profile: Profile) -> None:
    held = min(LINK.outward.bandwidth_bytes_per_s, LINK.inward.bandwidth_bytes_per_s) / 4
    link = msgspec.structs.replace(profile.link, throttle_bytes_per_s=held)
    values = msgspec.structs.replace(profile, link=link).to_frame("values")
    free = values[values["swap_s"].notna()]
    expected = LINK.outward.latency_s + LINK.inward.latency_s + 2 * free["size_bytes"] / held
    assert len(free) > 0
    assert list(free["swap_s"]) == pytest.approx(list(expected))


def test_ops_and_values_are_those_of_the_profile(profile: Profile) -> None:
    ops, values = profile.to_frame("ops"), profile.to_frame("values")
    assert list(ops["name"]) == [op.name for op in profile.ops]
    assert list(ops["tick"]) == list(profile.op_ticks)
    assert ops["duration_s"].sum() == pytest.approx(seconds(profile, *Phase))
    assert ops["born_bytes"].sum() == sum(value.size_bytes for value in profile.values if value.born >= 0)
    assert list(values["name"]) == [value.name for value in profile.values]
    assert values.loc[values["saved"], "size_bytes"].sum() == profile.to_frame("layers")["saved_bytes"].sum()
    free = values[values["saved"] & (values["pinned"] == "")]
    assert free["swap_s"].sum() == pytest.approx(profile.to_frame("layers")["swap_s"].sum())
    assert values["swap_s"].notna().sum() == len(free)


def test_recomputing_takes_the_ops_that_write_the_value_in_forward(profile: Profile) -> None:
    values = profile.to_frame("values")
    normed = next(number for number, value in enumerate(profile.values) if value.name == "blocks.0.1/native_batch_norm")
    writers = [op for op in profile.ops if op.phase is Phase.FORWARD and (normed in op.outputs or normed in op.writes)]
    assert [op.name for op in writers] == ["aten.native_batch_norm.default", "aten.relu_.default"]
    assert values.loc[normed, "recompute_s"] == sum(op.duration_s for op in writers)
    assert values.loc[normed, "ratio"] == values.loc[normed, "swap_s"] / values.loc[normed, "recompute_s"]
    # Its layer also bears the batch's statistics, by the same op, which is counted once.
    assert profile.to_frame("layers").loc["blocks.0.1", "recompute_s"] == pytest.approx(
        values.loc[normed, "recompute_s"]
    )


def test_what_cannot_be_recomputed_has_no_recompute_time(profile: Profile) -> None:
    number = next(number for number, value in enumerate(profile.values) if value.name == "blocks.1.1/native_batch_norm")
    lost = with_facts(profile, "values", number, unreplayable="it was tried")
    frame, before = lost.to_frame("layers"), profile.to_frame("layers")
    assert list(before.index[before["recompute_s"].notna() & frame["recompute_s"].isna()]) == ["blocks.1.1"]
    assert frame.loc["blocks.1.1", "swap_s"] == before.loc["blocks.1.1", "swap_s"] > 0
    assert pd.isna(frame.loc["blocks.1.1", "ratio"])
    assert pd.isna(lost.to_frame("values").loc[number, "recompute_s"])


def test_what_is_pinned_costs_neither_but_is_still_saved(profile: Profile) -> None:
    values = profile.to_frame("values")
    given = values[values["saved"] & (values["kind"] == Kind.INPUT)]
    assert len(given) == 1
    assert given[["swap_s", "recompute_s", "ratio"]].isna().all(axis=None)
    number = next(number for number, value in enumerate(profile.values) if value.kind is Kind.ACTIVATION)
    layer = profile.values[number].layer
    pinned = with_facts(profile, "values", number, pinned="held")
    frame, before = pinned.to_frame("layers"), profile.to_frame("layers")
    assert frame.loc[layer, "saved_bytes"] == before.loc[layer, "saved_bytes"]
    assert before.loc[layer, "free_bytes"] - frame.loc[layer, "free_bytes"] == profile.values[number].size_bytes


@pytest.mark.parametrize("kind", list(FRAMES))
def test_every_column_is_documented(profile: Profile, kind: str) -> None:
    text = inspect.getdoc(Profile.to_frame) or ""
    (documented,) = (part for part in re.split(r'\n(?=\* ``")', text) if part.startswith(f'* ``"{kind}"``: one row'))
    frame = profile.to_frame(kind)  # type: ignore[arg-type]
    assert [column for column in frame.columns if f"``{column}``" not in documented] == []


def test_another_kind_is_one_clear_error(profile: Profile) -> None:
    with pytest.raises(
        UsageError, match=r"^to_frame: expected 'layers', 'ops', 'values', found 'layer'; name one of these$"
    ):
        profile.to_frame("layer")  # type: ignore[arg-type]


def test_the_typed_kinds_are_those_there_are() -> None:
    hints = get_type_hints(Profile.to_frame, localns={"pd": pd})
    assert get_args(hints["kind"]) == tuple(FRAMES)


def test_a_profile_is_read_without_pandas() -> None:
    python("import sys; import poochplan; poochplan.Profile; sys.exit('pandas' in sys.modules)", is_fresh=True)

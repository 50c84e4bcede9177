"""What differs between two profiles: the step, the machine, the memory and the times, by layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
import pandas as pd

from poochplan.formats.plan_set import describe
from poochplan.formats.profile import Kind, Op, Profile
from poochplan.report.tables import plain_rows

from .figures import Figure, figure_data, those_that_differ


@dataclass(frozen=True)
class ProfileDifferences:
    """Two profiles of one step differ in times alone, and always do unless one is a copy."""

    figures: list[Figure]
    first_op: str
    """Where the steps part: the first op that is another; empty where they dispatch the same."""
    layers: pd.DataFrame
    """Of layers that differ, the most seconds first: ``saved_bytes``, ``step_s`` and their changes."""

    def __bool__(self) -> bool:
        return bool(self.figures or self.first_op or len(self.layers))

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "figures": figure_data(self.figures),
            "first_op": self.first_op,
            "layers": plain_rows(self.layers),
        }


def profile_differences(first: Profile, second: Profile) -> ProfileDifferences:
    """Everything that differs but notes and the times of single ops."""
    return ProfileDifferences(
        figures=those_that_differ(_figures(first, second)),
        first_op=_first_op(first, second),
        layers=_layers(first, second),
    )


def _figures(first: Profile, second: Profile) -> list[Figure]:
    a, b = first.times, second.times
    return [
        Figure("workload", first.workload, second.workload),
        Figure("model", first.model.fingerprint, second.model.fingerprint),
        Figure("inputs", describe(first.inputs), describe(second.inputs)),
        Figure("mode", first.mode, second.mode),
        Figure("device", first.device.name, second.device.name),
        Figure("threads", first.device.threads, second.device.threads),
        Figure("host", _text(first.host), _text(second.host)),
        Figure("versions", _text(first.versions), _text(second.versions)),
        Figure("in-core peak", first.in_core_peak_bytes, second.in_core_peak_bytes, "bytes"),
        Figure("in layer", first.in_core_peak_layer, second.in_core_peak_layer),
        Figure("saved for backward", _saved_bytes(first), _saved_bytes(second), "bytes"),
        Figure("live all step long", sum(first.static_bytes.values()), sum(second.static_bytes.values()), "bytes"),
        Figure("ops", len(first.ops), len(second.ops)),
        Figure("saves and uses", len(first.points), len(second.points)),
        Figure("step", a.step_s, b.step_s, "s"),
        Figure("its spread", a.spread_s, b.spread_s, "s"),
        Figure("forward", a.forward_s, b.forward_s, "s"),
        Figure("backward", a.backward_s, b.backward_s, "s"),
        Figure("optimizer", a.optimizer_s, b.optimizer_s, "s"),
        Figure("rate out", first.link.out_bytes_per_s, second.link.out_bytes_per_s, "bytes/s"),
        Figure("rate in", first.link.in_bytes_per_s, second.link.in_bytes_per_s, "bytes/s"),
        Figure("assumed", "; ".join(first.assumed), "; ".join(second.assumed)),
    ]


def _first_op(first: Profile, second: Profile) -> str:
    for index, (ours, theirs) in enumerate(zip_longest(first.ops, second.ops)):
        if ours is None or theirs is None or (ours.name, ours.layer) != (theirs.name, theirs.layer):
            return f"op {index}: {_op_text(ours)}, then {_op_text(theirs)}"
    return ""


def _op_text(op: Op | None) -> str:
    return "no op" if op is None else f"{op.name} in {op.layer or 'the step, outside the model'} ({op.phase})"


def _layers(first: Profile, second: Profile) -> pd.DataFrame:
    """Columns ``saved_bytes``, ``saved_change``, ``step_s`` and ``step_change``: of the first, and what the second adds
    to it, in words for a person; sorted by seconds.
    """
    ours, theirs = (_layer_frame(profile) for profile in (first, second))
    every = ours.index.union(theirs.index, sort=False)
    ours, theirs = ours.reindex(every, fill_value=0.0), theirs.reindex(every, fill_value=0.0)
    frame = pd.DataFrame(
        {
            "saved_bytes": ours["saved_bytes"],
            "then_bytes": theirs["saved_bytes"],
            "step_s": ours["step_s"],
            "then_s": theirs["step_s"],
        }
    ).rename_axis("layer")
    differs = (frame["saved_bytes"] != frame["then_bytes"]) | (frame["step_s"] != frame["then_s"])
    changed = frame[differs]
    order = (changed["then_s"] - changed["step_s"]).abs().sort_values(ascending=False, kind="stable").index
    return changed.loc[order]


def _layer_frame(profile: Profile) -> pd.DataFrame:
    frame = profile.to_frame("layers")
    return pd.DataFrame(
        {"saved_bytes": frame["saved_bytes"].astype(float), "step_s": frame["forward_s"] + frame["backward_s"]}
    )


def _saved_bytes(profile: Profile) -> int:
    return sum(value.size_bytes for value in profile.values if value.kind is Kind.ACTIVATION)


def _text(facts: msgspec.Struct | dict[str, str] | None) -> str | None:
    if facts is None:
        return None
    return ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(facts).items())

"""What can be asked of a profile: a row per layer, op or value, and words for how its seconds came about."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from poochplan.errors import UsageError
from poochplan.units import format_seconds

from .occupancy import live_bytes
from .profile_parts import LayerTimes, Phase, PointKind, ProfileData

if TYPE_CHECKING:
    import pandas as pd  # in the functions that need it, for a training loop asks for none of them

OUTSIDE = "(outside the model)"


def profile_frame(profile: ProfileData, kind: str) -> pd.DataFrame:
    """The frame of that kind; see :meth:`~.profile.Profile.to_frame`.

    Raises
    ------
    UsageError
        There is no such kind.
    """
    if kind not in FRAMES:
        raise UsageError(f"to_frame: expected {', '.join(map(repr, FRAMES))}, found {kind!r}; name one of these")
    return FRAMES[kind](profile)


def saved_values(profile: ProfileData) -> list[int]:
    """Values that autograd saves, in the order of first packs: those a plan decides on."""
    saves = (point.handle for point in profile.points if point.kind is PointKind.SAVE)
    return list(dict.fromkeys(profile.handles[handle].value for handle in saves))


def writers_by_value(profile: ProfileData) -> list[list[int]]:
    """Forward ops that create or write each value, in order."""
    writers: list[list[int]] = [[] for _ in profile.values]
    for index, op in enumerate(profile.ops):
        if op.phase is Phase.FORWARD:
            for value in dict.fromkeys((*op.outputs, *op.writes)):
                writers[value].append(index)
    return writers


def swap_seconds(profile: ProfileData, size_bytes: int) -> float:
    """Seconds out and back in over the profile's link, nothing hidden behind compute."""
    return profile.link.out_seconds(size_bytes) + profile.link.in_seconds(size_bytes)


def reconciliation(profile: ProfileData, least: float = 0.0) -> dict[str, str]:
    """How the ops' seconds were brought to the step's, in words; see :meth:`~.profile.Profile.reconciliation`."""
    times = profile.times
    counts = Counter(op.phase for op in profile.ops)
    told = {}
    for phase, phase_s, scale in (
        (Phase.FORWARD, times.forward_s, times.forward_scale),
        (Phase.BACKWARD, times.backward_s, times.backward_scale),
        (Phase.OPTIMIZER, times.optimizer_s, times.optimizer_scale),
    ):
        if not times.iterations or not counts[phase] or scale <= 0 or abs(1 - 1 / scale) <= least:
            continue
        ops_s = phase_s / scale
        if scale > 1:
            done = f"the gap of {format_seconds(phase_s - ops_s)} is spread over them"
        else:
            done = f"scaled down by {1 - scale:.0%}"
        told[str(phase)] = (
            f"{counts[phase]} ops take {format_seconds(ops_s)} timed one by one, "
            f"{format_seconds(phase_s)} uninstrumented: {done}"
        )
    return told


def _layers(profile: ProfileData) -> pd.DataFrame:
    import pandas as pd

    columns = ("saved_bytes", "values", "free_bytes", "forward_s", "backward_s", "swap_s", "live_bytes")
    rows: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(columns, 0))
    live = live_bytes(profile)
    for op, tick in zip(profile.ops, profile.op_ticks, strict=True):
        if op.phase is not Phase.OPTIMIZER:
            row = rows[op.layer or OUTSIDE]
            row["forward_s" if op.phase is Phase.FORWARD else "backward_s"] += op.duration_s
            row["live_bytes"] = max(row["live_bytes"], int(live[tick]))
    writers = writers_by_value(profile)
    own_writers: dict[str, set[int]] = defaultdict(set)
    lost: set[str] = set()
    for index in saved_values(profile):
        value = profile.values[index]
        layer = value.layer or OUTSIDE
        row = rows[layer]
        row["saved_bytes"] += value.size_bytes
        row["values"] += 1
        if value.pinned:
            continue
        row["free_bytes"] += value.size_bytes
        row["swap_s"] += swap_seconds(profile, value.size_bytes)
        own_writers[layer].update(writers[index])
        if value.unreplayable:
            lost.add(layer)
    for layer, row in rows.items():
        free = layer in own_writers and layer not in lost
        row["recompute_s"] = sum(profile.ops[op].duration_s for op in own_writers[layer]) if free else math.nan
        row["ratio"] = row["swap_s"] / row["recompute_s"] if row["recompute_s"] else math.nan
    for times in profile.layer_times:
        rows[times.layer or OUTSIDE].update(_spreads(times))
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(_LAYER_COLUMNS)).rename_axis("layer")
    frame = frame.astype(dict.fromkeys(("saved_bytes", "values", "free_bytes", "live_bytes"), "int64"))
    return frame.sort_values("saved_bytes", ascending=False, kind="stable")


_LAYER_COLUMNS = (
    "saved_bytes", "values", "free_bytes", "forward_s", "forward_median_s", "forward_spread_s", "backward_s",
    "backward_median_s", "backward_spread_s", "swap_s", "recompute_s", "ratio", "live_bytes",
)  # fmt: skip


def _spreads(times: LayerTimes) -> dict[str, float]:
    return {
        "forward_median_s": times.forward_s,
        "forward_spread_s": times.forward_spread_s,
        "backward_median_s": times.backward_s,
        "backward_spread_s": times.backward_spread_s,
    }


def _ops(profile: ProfileData) -> pd.DataFrame:
    import pandas as pd

    live = live_bytes(profile)
    rows = [
        (
            op.name, op.layer or OUTSIDE, str(op.phase), tick, op.duration_s, op.spread_s, op.inputs, op.outputs,
            op.writes, sum(profile.values[value].size_bytes for value in op.outputs), op.workspace_bytes,
            int(live[tick]), op.random, op.opaque,
        )
        for op, tick in zip(profile.ops, profile.op_ticks, strict=True)
    ]  # fmt: skip
    columns = (
        "name", "layer", "phase", "tick", "duration_s", "spread_s", "inputs", "outputs", "writes", "born_bytes",
        "workspace_bytes", "live_bytes", "random", "opaque",
    )  # fmt: skip
    return pd.DataFrame(rows, columns=list(columns)).rename_axis("op")


def _values(profile: ProfileData) -> pd.DataFrame:
    import pandas as pd

    saved = set(saved_values(profile))
    writers = writers_by_value(profile)
    rows = []
    for index, value in enumerate(profile.values):
        free = index in saved and not value.pinned
        swap_s = swap_seconds(profile, value.size_bytes) if free else math.nan
        replayable = free and not value.unreplayable
        recompute_s = sum(profile.ops[op].duration_s for op in writers[index]) if replayable else math.nan
        rows.append(
            (
                value.name, value.layer or OUTSIDE, str(value.kind), value.size_bytes, value.dtype, value.shape,
                value.born, value.forward_death, value.freed, index in saved, swap_s, recompute_s,
                swap_s / recompute_s if recompute_s else math.nan, value.pinned, value.unreplayable,
            )
        )  # fmt: skip
    columns = (
        "name", "layer", "kind", "size_bytes", "dtype", "shape", "born", "forward_death", "freed", "saved", "swap_s",
        "recompute_s", "ratio", "pinned", "unreplayable",
    )  # fmt: skip
    return pd.DataFrame(rows, columns=list(columns)).rename_axis("value")


FRAMES: dict[str, Callable[[ProfileData], pd.DataFrame]] = {"layers": _layers, "ops": _ops, "values": _values}

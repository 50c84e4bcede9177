"""Queries on a profile: a row per layer, op or value; how its seconds were obtained; and advice on changes to the step
that help plans.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import asdict

from poochplan.units import format_bytes, format_rate, format_seconds

from .occupancy import live_bytes
from .profile_data import ProfileData
from .profile_parts import Link, OptimizerState, Phase, PointKind, StepFacts

COMPILED_REGION = "compiled_region"
"""Name of the op that stands for a call of a compiled module."""
LARGE_SHARE = 0.5
"""Share of the saved bytes in one compiled module; none of these leaves before the module's forward ends."""
FIXED_SHARE = 0.25
"""Share of the saved bytes that no plan can swap or recompute."""
GARBAGE_SHARE = 0.05
"""Share of the in-core peak that waits for the garbage collector."""


if TYPE_CHECKING:
    import pandas as pd  # in the functions that need it, because a training loop calls none of them

OUTSIDE = "(outside the model)"


WRITTEN_LATE = "in a later step other bytes than forward left came back for it"
ProfileT = TypeVar("ProfileT", bound=ProfileData)


def with_kept(profile: ProfileT, names: Iterable[str]) -> ProfileT:
    """The same step, in which plans keep the values of these names."""
    kept = set(names)
    values = (
        msgspec.structs.replace(value, pinned=value.pinned or WRITTEN_LATE) if value.name in kept else value
        for value in profile.values
    )
    return msgspec.structs.replace(profile, values=tuple(values))


def saved_values(profile: ProfileData) -> list[int]:
    """The values that autograd saves, in the order of first packs; a plan decides about these."""
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


COLLECTIVES = "_c10d_functional."
"""The beginning of the names of the ops by which ranks exchange DTensors."""
GLOO_THREADS = 2


def in_flight_bytes(profile: ProfileData) -> int:
    """On the CPU, bytes that a step on several ranks may take beyond its lifetimes: each of gloo's threads keeps the
    buffers of its last collective until it runs again.

    Under FSDP2 they are as large as the weights that are gathered at once. Under tensor parallelism each thread may
    keep what one collective reads and what it gives.
    """
    if profile.device.kind != "cpu":
        return 0
    at_once = Counter[int | None]()
    for value in profile.values:
        if value.stretch_of >= 0:
            at_once[value.born_tick] += profile.rounded_bytes(value.size_bytes)
    collectives = ({*op.inputs, *op.outputs} for op in profile.ops if op.name.startswith(COLLECTIVES))
    exchanged = (sum(profile.rounded_bytes(profile.values[one].size_bytes) for one in both) for both in collectives)
    return GLOO_THREADS * max(itertools.chain(at_once.values(), exchanged), default=0)


def movable_bytes(profile: ProfileData, optimizer: OptimizerState) -> int:
    """Bytes of the optimizer's state that may leave the device between its steps."""
    numbers = itertools.chain.from_iterable(optimizer.parameters)
    return sum(profile.rounded_bytes(profile.values[number].size_bytes) for number in numbers)


def movable_text(profile: ProfileData) -> str:
    """What of the optimizers' state may leave the device between steps, in words; empty if nothing may."""
    sizes = [(one, movable_bytes(profile, one)) for one in profile.optimizers]
    return "; ".join(
        f"{format_bytes(size_bytes)} of {one.name}'s state, {'in chunks' if one.separable else 'as a whole'}"
        for one, size_bytes in sizes
        if size_bytes
    )


def swap_seconds(profile: ProfileData, size_bytes: int) -> float:
    """Seconds of copies out and back over the profile's link, without overlap with compute."""
    return profile.link.out_seconds(size_bytes) + profile.link.in_seconds(size_bytes)


def reconciliation(profile: ProfileData, least: float = 0.0) -> dict[str, str]:
    """How the ops' seconds were adapted to the step's, in words; see :meth:`~.profile.Profile.reconciliation`."""
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
        row = rows[times.layer or OUTSIDE]
        row["forward_median_s"], row["forward_spread_s"] = times.forward_s, times.forward_spread_s
        row["backward_median_s"], row["backward_spread_s"] = times.backward_s, times.backward_spread_s
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(_LAYER_COLUMNS)).rename_axis("layer")
    frame = frame.astype(dict.fromkeys(("saved_bytes", "values", "free_bytes", "live_bytes"), "int64"))
    return frame.sort_values("saved_bytes", ascending=False, kind="stable")


_LAYER_COLUMNS = (
    "saved_bytes", "values", "free_bytes", "forward_s", "forward_median_s", "forward_spread_s", "backward_s",
    "backward_median_s", "backward_spread_s", "swap_s", "recompute_s", "ratio", "live_bytes",
)  # fmt: skip


def _ops(profile: ProfileData) -> pd.DataFrame:
    import pandas as pd

    live = live_bytes(profile)
    rows = [
        asdict(op)
        | {"layer": op.layer or OUTSIDE, "phase": str(op.phase), "tick": tick, "live_bytes": int(live[tick])}
        | {"born_bytes": sum(profile.values[value].size_bytes for value in op.outputs)}
        for op, tick in zip(profile.ops, profile.op_ticks, strict=True)
    ]
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
        ratio = swap_s / recompute_s if recompute_s else math.nan
        known = {"layer": value.layer or OUTSIDE, "kind": str(value.kind), "saved": index in saved}
        rows.append(asdict(value) | known | {"swap_s": swap_s, "recompute_s": recompute_s, "ratio": ratio})
    columns = (
        "name", "layer", "kind", "size_bytes", "dtype", "shape", "born", "forward_death", "freed", "saved", "swap_s",
        "recompute_s", "ratio", "pinned", "unreplayable",
    )  # fmt: skip
    return pd.DataFrame(rows, columns=list(columns)).rename_axis("value")


def link_rows(link: Link) -> dict[str, str]:
    """What was measured of the link, in words."""
    pageable = {"out, pageable": link.pageable_out, "in, pageable": link.pageable_in}
    ways = {"out": link.outward, "in": link.inward} | {name: way for name, way in pageable.items() if way is not None}
    held = {"held to": format_rate(link.throttle_bytes_per_s)} if link.throttle_bytes_per_s else {}
    return {
        **{
            name: f"{format_rate(way.bandwidth_bytes_per_s)} after {format_seconds(way.latency_s)}"
            for name, way in ways.items()
        },
        "both at once": f"each keeps {link.duplex:.0%} of its rate",
        "compute beside copies": f"{link.interference_out:+.0%} time beside copies out, {link.interference_in:+.0%} in",
        **held,
    }


def link_line(link: Link) -> str:
    return "; ".join(f"{name}: {text}" for name, text in link_rows(link).items())


FRAMES: dict[str, Callable[[ProfileData], pd.DataFrame]] = {"layers": _layers, "ops": _ops, "values": _values}


def advice(profile: ProfileData) -> Iterator[str]:
    """Changes to the step that would help plans, a line each, the most important first."""
    facts = profile.facts or StepFacts()
    yield from limits(profile)
    if facts.modules and facts.eval_modules >= facts.modules:
        yield (
            "the model was in eval mode while it was profiled: if it is trained in train mode, call model.train() first"
        )
    if facts.garbage_bytes and facts.garbage_bytes >= GARBAGE_SHARE * profile.in_core_peak_bytes:
        yield (
            f"{format_bytes(facts.garbage_bytes)} of the step wait in reference cycles for Python's garbage collector, "
            "and may come on top of any budget: break the cycles, or call gc.collect() after each step"
        )
    if profile.switches.get("benchmark") == "True" and any("convolution" in op.name for op in profile.ops):
        yield (
            "torch.backends.cudnn.benchmark is on: a convolution may then give other bits on another thread, so none "
            "is recomputed; to let plans recompute convolutions, switch it off and profile again"
        )
    if facts.unmeasured_regions:
        yield (
            f"memory that {facts.unmeasured_regions} runs of compiled regions take and give back inside is not known, "
            "because another profiler was on: peaks may be higher than predicted; profile again without it"
        )
    if facts.unmeasured_ops:
        yield (
            f"memory that ops take and give back inside is not known for {facts.unmeasured_ops} that could not be run "
            "by themselves: peaks may be higher than predicted; profile in mode run or swap-all if the step can run"
        )


def limits(profile: ProfileData) -> tuple[str, ...]:
    """The lines of advice that would lower the smallest budget."""
    return tuple(line for line in (_compiled(profile), _checkpointed(profile), _fixed(profile)) if line)


def _compiled(profile: ProfileData) -> str:
    if profile.facts and profile.facts.graph_mode:
        return ""
    saved = {*saved_values(profile)}
    inside: Counter[str] = Counter()
    for op in profile.ops:
        if op.name == COMPILED_REGION:
            inside[op.layer] += sum(profile.values[number].size_bytes for number in op.outputs if number in saved)
    saved_bytes = sum(profile.values[number].size_bytes for number in saved)
    layer, size_bytes = max(inside.items(), key=lambda item: item[1], default=("", 0))
    if not saved_bytes or size_bytes < LARGE_SHARE * saved_bytes:
        return ""
    where = f"the compiled module {layer}" if layer else "one compiled module, the model itself"
    runs = Counter(op.phase for op in profile.ops if op.name == COMPILED_REGION and op.layer == layer)
    in_parts = runs[Phase.BACKWARD] > runs[Phase.FORWARD]
    drawback = "leave only when its forward ends" if in_parts else "come back all at once"
    return (
        f"{size_bytes / saved_bytes:.0%} of the saved bytes are inside {where}, where they cannot be recomputed and "
        f"{drawback}: have poochplan.compile compile it, or compile its blocks instead"
    )


def _checkpointed(profile: ProfileData) -> str:
    layers = profile.facts.checkpointed if profile.facts else ()
    if not layers:
        return ""
    where = f"{layers[0] or 'outside the model'}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''}"
    return (
        f"activation checkpointing is on ({where} ran forward again in backward), which no plan sees into: switch it "
        "off and profile again, so that the planner decides what to recompute"
    )


def _fixed(profile: ProfileData) -> str:
    saved = [profile.values[number] for number in saved_values(profile)]
    kept_bytes = profile.facts.kept_bytes if profile.facts else 0
    saved_bytes = sum(value.size_bytes for value in saved) + kept_bytes
    reasons: Counter[str] = Counter({"it is sparse, nested or of a subclass": kept_bytes})
    for value in saved:
        if value.pinned:
            reasons[value.pinned] += value.size_bytes
    fixed_bytes = reasons.total()
    if not fixed_bytes or fixed_bytes < FIXED_SHARE * saved_bytes:
        return ""
    return (
        f"{fixed_bytes / saved_bytes:.0%} of the saved bytes ({format_bytes(fixed_bytes)}) can be neither swapped "
        f"nor recomputed, most of it for one reason: {reasons.most_common(1)[0][0]}"
    )

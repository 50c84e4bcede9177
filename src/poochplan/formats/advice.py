"""What a profile advises: what in the way the step is run keeps plans from doing more. Pure functions of a profile."""

from __future__ import annotations

from collections import Counter

from poochplan.formats.profile_parts import Phase, ProfileData, Value
from poochplan.units import format_bytes

COMPILED_REGION = "compiled_region"
"""Name of the op that stands for a call of a compiled module."""
LARGE_SHARE = 0.5
"""Of what is saved, in one compiled module: nothing of it leaves before its forward ends."""
FIXED_SHARE = 0.25
"""Of what is saved, that no plan can swap or recompute."""
GARBAGE_SHARE = 0.05
"""Of the in-core peak, that waits for the garbage collector."""


def advice(profile: ProfileData) -> tuple[str, ...]:
    """What to change about the step, a line each, what matters most first; empty where there is nothing to say."""
    unknown = [_unmeasured(profile), _unmeasured_ops(profile)]
    lines = [*limits(profile), _eval_mode(profile), _garbage(profile), _fixed(profile), _benchmark(profile), *unknown]
    return tuple(line for line in lines if line)


def limits(profile: ProfileData) -> tuple[str, ...]:
    """Those lines that say why the smallest budget is not smaller."""
    return tuple(line for line in (_compiled(profile), _checkpointed(profile)) if line)


def _saved(profile: ProfileData) -> list[Value]:
    return [profile.values[number] for number in dict.fromkeys(handle.value for handle in profile.handles)]


def _compiled(profile: ProfileData) -> str:
    if profile.facts and profile.facts.graph_mode:
        return ""
    saved = {handle.value for handle in profile.handles}
    inside: Counter[str] = Counter()
    for op in profile.ops:
        if op.name == COMPILED_REGION:
            inside[op.layer] += sum(profile.values[number].size_bytes for number in op.outputs if number in saved)
    saved_bytes = sum(value.size_bytes for value in _saved(profile))
    layer, size_bytes = max(inside.items(), key=lambda item: item[1], default=("", 0))
    if not saved_bytes or size_bytes < LARGE_SHARE * saved_bytes:
        return ""
    where = f"the compiled module {layer}" if layer else "one compiled module, the model itself"
    runs = Counter(op.phase for op in profile.ops if op.name == COMPILED_REGION and op.layer == layer)
    in_parts = runs[Phase.BACKWARD] > runs[Phase.FORWARD]
    drawback = "leaves only when its forward ends" if in_parts else "comes back all at once"
    return (
        f"{size_bytes / saved_bytes:.0%} of what is saved lies inside {where}, where it cannot be recomputed and "
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


def _eval_mode(profile: ProfileData) -> str:
    facts = profile.facts
    if not facts or not facts.modules or facts.eval_modules < facts.modules:
        return ""
    return "the model was in eval mode while it was profiled: if it is trained in train mode, call model.train() first"


def _garbage(profile: ProfileData) -> str:
    garbage_bytes = profile.facts.garbage_bytes if profile.facts else 0
    if not garbage_bytes or garbage_bytes < GARBAGE_SHARE * profile.in_core_peak_bytes:
        return ""
    return (
        f"{format_bytes(garbage_bytes)} of the step wait in reference cycles for Python's garbage collector, and may "
        "come on top of any budget: break the cycles, or call gc.collect() after each step"
    )


def _fixed(profile: ProfileData) -> str:
    saved = _saved(profile)
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
        f"{fixed_bytes / saved_bytes:.0%} of what is saved ({format_bytes(fixed_bytes)}) can be neither swapped nor "
        f"recomputed, most of it for one reason: {reasons.most_common(1)[0][0]}"
    )


def _benchmark(profile: ProfileData) -> str:
    if profile.switches.get("benchmark") != "True" or not any("convolution" in op.name for op in profile.ops):
        return ""
    return (
        "torch.backends.cudnn.benchmark is on, under which a convolution may give other bits on another thread, and so "
        "none is recomputed: switch it off and profile again, where plans are to recompute them"
    )


def _unmeasured(profile: ProfileData) -> str:
    count = profile.facts.unmeasured_regions if profile.facts else 0
    if not count:
        return ""
    return (
        f"what {count} runs of compiled regions take and give back inside is not known, since another profiler was on: "
        "peaks may be higher than predicted; profile again without it"
    )


def _unmeasured_ops(profile: ProfileData) -> str:
    count = profile.facts.unmeasured_ops if profile.facts else 0
    if not count:
        return ""
    return (
        f"what ops take and give back inside is not known of {count} that could not be run by themselves: peaks may be "
        "higher than predicted; profile in mode run or swap-all where the step can run"
    )

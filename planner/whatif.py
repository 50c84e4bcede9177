"""The same step on another machine: another link, another device memory, a faster or slower device.

Nothing is measured here. The changed profile lists its assumptions in ``assumed``, and the times of its plans are
estimates. Their memory is still exact, because bytes do not depend on speed.
"""

from __future__ import annotations

import math

import msgspec

from poochplan.errors import InfeasibleError, UsageError
from poochplan.formats.occupancy import held_until, static_bytes
from poochplan.formats.profile import PRESET_BYTES_PER_S, Kind, Link, Profile, preset_link, rated_link
from poochplan.planner.simulator.optimizer_state import all_streamed
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import swap_all_on_demand
from poochplan.planner.simulator.views import at_speed
from poochplan.units import format_bytes, format_rate, parse_bytes, parse_rate

MEASURED = "measured"
"""The name for the profile's own link."""


def for_machine(
    profile: Profile,
    *,
    link: str | float | None = None,
    device_memory: str | int | None = None,
    compute_scale: float | None = None,
) -> Profile:
    """The profile as it would be on another machine. Arguments that are None change nothing.

    Parameters
    ----------
    link: a preset of ``formats/profile.py``, ``"measured"``, or a rate (see :func:`parse_link`).
    device_memory: bytes of the device, or text such as ``"16GiB"``.
    compute_scale: factor for the duration of every op and for step times: 0.5 is a device twice as fast.

    Raises
    ------
    UsageError
        The link, the memory or the factor is invalid.
    InfeasibleError
        The memory does not hold the values that stay for the whole step. The error names the smallest possible budget.
    """
    assumed = list(profile.assumed)
    changed = profile
    if compute_scale is not None and not (math.isfinite(compute_scale) and compute_scale > 0):
        raise UsageError(
            f"compute scale: expected a factor above 0 on the time of every op (0.5 is a device twice as fast), "
            f"found {compute_scale}"
        )
    if compute_scale is not None and compute_scale != 1:
        changed = at_speed(changed, compute_scale)
        assumed.append(f"compute takes {compute_scale:g} times as long as measured on {profile.device.name}")
    if link is not None and link != MEASURED:
        other = parse_link(link)
        changed = msgspec.structs.replace(changed, link=other)
        assumed.append(f"link {link_text(other)}, instead of {profile.link.name}")
    if device_memory is not None:
        memory_bytes = parse_bytes(device_memory, "device memory")
        _check_memory(profile, memory_bytes)
        name = f"{changed.device.name} ({format_bytes(memory_bytes)})"
        device = msgspec.structs.replace(changed.device, name=name, memory_bytes=memory_bytes)
        changed = msgspec.structs.replace(changed, device=device)
        assumed.append(
            f"device memory {format_bytes(memory_bytes)}, instead of {format_bytes(profile.device.memory_bytes)}"
        )
    return msgspec.structs.replace(changed, assumed=tuple(assumed)) if changed is not profile else profile


def with_bytes_beside(profile: Profile, size_bytes: int) -> Profile:
    """The same step with this many more bytes, which exist before it and live through it.

    They can be anything outside the step: a data set, a copy of the weights. Plans are for the same model and the same
    points.
    """
    value = held_until(f"before/beside#{len(profile.values)}", size_bytes, profile.tick_count - 1)
    taken_bytes = profile.rounded_bytes(size_bytes)
    static = profile.static_bytes | {str(Kind.INPUT): profile.static_bytes.get(str(Kind.INPUT), 0) + taken_bytes}
    return msgspec.structs.replace(
        profile,
        values=(*profile.values, value),
        static_bytes=static,
        in_core_peak_bytes=profile.in_core_peak_bytes + taken_bytes,
    )


def parse_link(text: str | float) -> Link:
    """The link for a preset's name, for a rate such as ``"12GB/s"``, or for two rates, ``"12GB/s,25GB/s"`` (out, in).

    A link from rates has the presets' latency, full duplex, and no interference with compute. Raises ``UsageError`` for
    other texts; the message lists the presets.
    """
    name = str(text).strip()
    if name in PRESET_BYTES_PER_S:
        return preset_link(name)
    rates = name.split(",")
    try:
        if len(rates) > 2:
            raise UsageError("expected two rates at most")
        outward, inward = (parse_rate(rate) for rate in (rates[0], rates[-1]))
    except UsageError:
        raise UsageError(
            f"link: expected {', '.join(PRESET_BYTES_PER_S)}, {MEASURED}, a rate above 0 such as 12GB/s, or two "
            f"(out,in) such as 12GB/s,25GB/s; found {str(text)!r}"
        ) from None
    return rated_link(_rates_text(outward, inward), outward, inward)


def link_text(link: Link) -> str:
    """Text such as ``"pcie3 (12 GB/s each way)"``."""
    rates = _rates_text(link.outward.bandwidth_bytes_per_s, link.inward.bandwidth_bytes_per_s)
    return rates if link.name == rates else f"{link.name} ({rates})"


def _rates_text(outward: float, inward: float) -> str:
    if outward == inward:
        return f"{format_rate(outward)} each way"
    return f"{format_rate(outward)} out, {format_rate(inward)} in"


def _check_memory(profile: Profile, memory_bytes: int) -> None:
    least = Problem.of(profile, state=all_streamed(profile))
    static = sum(static_bytes(least.profile).values())
    if memory_bytes > static:
        return
    smallest = swap_all_on_demand(least).peak_bytes
    raise InfeasibleError(
        f"device memory: expected more than the {static} bytes ({format_bytes(static)}) of parameters, optimizer "
        f"state and inputs that stay in memory for the whole step, found {memory_bytes} bytes "
        f"({format_bytes(memory_bytes)}); name more memory: "
        f"the smallest budget that has a plan is {smallest} bytes ({format_bytes(smallest)})",
        smallest_budget_bytes=smallest,
    )

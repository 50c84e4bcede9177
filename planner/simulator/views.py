"""The same step at another speed, without an arena, or on its share of a host's link: see ``Problem.of``."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from poochplan.errors import UsageError
from poochplan.formats.profile import LinkDirection, Profile

Record = TypeVar("Record", bound=msgspec.Struct)


def without_arena(profile: Profile) -> Profile:
    """The same step without an arena. All ops take longer by the ratio measured for the whole step."""
    unserved_s, step_s = profile.times.unserved_step_s, profile.times.step_s
    if unserved_s is None or step_s <= 0:
        return profile
    slower = at_speed(profile, unserved_s / step_s)
    times = msgspec.structs.replace(
        slower.times, plain_step_s=profile.times.plain_step_s, step_s=unserved_s, unserved_step_s=None
    )
    return msgspec.structs.replace(slower, times=times, runtime=profile.runtime)  # the machine is the same


def on_ranks(profile: Profile, ranks: int) -> Profile:
    """The same step on each of this many ranks of one host, whose link they share evenly.

    A link that was measured while as many ranks copied at once, or more, is not divided again. Latency, duplex and
    interference stay as measured. Raises ``UsageError`` if the number is below 1.
    """
    if ranks < 1:
        raise UsageError(f"ranks per host: expected a number of at least 1, found {ranks}")
    link = profile.link
    if ranks <= link.ranks:
        return profile
    share = link.ranks / ranks
    out, back = (
        LinkDirection(latency_s=way.latency_s, bandwidth_bytes_per_s=max(1.0, way.bandwidth_bytes_per_s * share))
        for way in (link.outward, link.inward)
    )
    return msgspec.structs.replace(profile, link=msgspec.structs.replace(link, outward=out, inward=back, ranks=ranks))


def at_speed(profile: Profile, scale: float) -> Profile:
    """The same step on a device on which all ops take ``scale`` times as long."""
    device = msgspec.structs.replace(profile.device, name=f"{profile.device.name} (x{scale:g})")
    return msgspec.structs.replace(
        profile,
        ops=tuple(_scaled(op, scale) for op in profile.ops),
        times=_scaled(profile.times, scale),
        layer_times=tuple(_scaled(layer, scale) for layer in profile.layer_times),
        device=device,
        runtime=None,  # its costs there are not known
    )


def _scaled(record: Record, scale: float) -> Record:
    """The same record with all seconds multiplied by ``scale``."""
    fields = ((name, getattr(record, name)) for name in record.__struct_fields__ if name.endswith("_s"))
    return msgspec.structs.replace(record, **{name: value * scale for name, value in fields if value is not None})

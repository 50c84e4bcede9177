"""A profile in a dozen rows."""

from __future__ import annotations

from poochplan.formats.occupancy import static_bytes
from poochplan.formats.profile_parts import ProfileData, StepTimes
from poochplan.units import format_bytes, format_rate, format_seconds

NOTES_SHOWN = 5


def profile_summary(profile: ProfileData) -> list[tuple[str, str]]:
    """What a reader wants to know first: machine, times, peak, what is saved, the link, notes."""
    times, link = profile.times, profile.link
    saved = [profile.values[value] for value in dict.fromkeys(handle.value for handle in profile.handles)]
    static = ", ".join(f"{name} {format_bytes(size)}" for name, size in static_bytes(profile).items())
    free_bytes = sum(value.size_bytes for value in saved if not value.pinned)
    return [
        ("device", f"{profile.device.name} ({profile.device.kind}), mode {profile.mode}"),
        ("in-core step", in_core_step_text(times)),
        (
            "forward, backward, optimizer",
            ", ".join(map(format_seconds, (times.forward_s, times.backward_s, times.optimizer_s))),
        ),
        (
            "in-core peak",
            f"{format_bytes(profile.in_core_peak_bytes)}"
            + (f", in {profile.in_core_peak_layer}" if profile.in_core_peak_layer else ""),
        ),
        ("live all step long", static or "nothing"),
        (
            "saved for backward",
            f"{format_bytes(sum(value.size_bytes for value in saved))} in {len(saved)} values, "
            f"{format_bytes(free_bytes)} of it free to swap or recompute",
        ),
        (
            f"link ({link.name})",
            f"out {format_rate(link.out_bytes_per_s)}, in {format_rate(link.in_bytes_per_s)}",
        ),
        *(("assumed", text) for text in profile.assumed),
        *(("note", text) for text in profile.notes[:NOTES_SHOWN]),
    ]


def in_core_step_text(times: StepTimes) -> str:
    """The seconds by PyTorch alone, and those that plans are made of."""
    timed = f"{format_seconds(times.step_s)} (spread {format_seconds(times.spread_s)})"
    if times.unserved_step_s is not None:
        timed += f" from one arena, {format_seconds(times.unserved_step_s)} without"
    if times.plain_step_s is None:
        return f"{timed}; not timed by PyTorch alone"
    return f"{format_seconds(times.plain_step_s)} by PyTorch alone; {timed}"

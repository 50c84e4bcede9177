"""Which values are replayed in which step where not all can be at once: where the step itself does not fit."""

from __future__ import annotations

from poochplan.formats.profile import Profile
from poochplan.planner.simulator.problem import build_problem


def parts_of(profile: Profile, parts: int) -> list[int]:
    """A part per saved value, in the order of first packs, such that replays hold little beyond their own values.

    When one part's values are recomputed and all others swapped, a replay of a value brings back those it starts from:
    from the host, or, of its own part, by replaying them and all that they start from. Chains (the residual stream of a
    transformer) would have one replay bring back the whole step. So each value, in the order of saving, goes to the
    part in which its replay holds the fewest bytes. With two parts that is at most 9% over the largest replay alone on
    the workloads of ``configs/``, where taking every other value makes it up to seven times as much.
    """
    replays = build_problem(profile).replay
    sizes = [replays.value_bytes[value] for value in replays.value_of]
    part_of: list[int] = []
    held: list[set[int]] = []
    """Per value: what its replay holds, itself among it."""
    for value, replay in enumerate(replays.replays):
        sources = [source for source in (replay.inputs if replay else ()) if source < value]
        holds = [
            {value}.union(*(held[source] if part_of[source] == part else {source} for source in sources))
            for part in range(parts)
        ]
        bytes_held = [sum(sizes[other] for other in together) for together in holds]
        part = bytes_held.index(min(bytes_held))
        part_of.append(part)
        held.append(holds[part])
    return part_of

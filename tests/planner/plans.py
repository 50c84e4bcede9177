"""Plans made of schedules, for the independent checker."""

from __future__ import annotations

import msgspec

from poochplan.planner.planning import plan
from poochplan.planner.schedule import Schedule
from poochplan.planner.schema import Decision, Plan
from poochplan.profiler.schema import Profile


def plan_with(profile: Profile, schedule: Schedule) -> Plan:
    """A plan that carries out ``schedule``, whatever its peak is."""
    kept = plan(profile, profile.in_core_peak_bytes)
    values, offset = [], 0
    for value, decision in zip(kept.values, schedule.decisions, strict=True):
        swapped = decision is Decision.SWAP
        values.append(msgspec.structs.replace(value, decision=decision, host_offset=offset if swapped else -1))
        offset += (value.size_bytes + 4095) // 4096 * 4096 if swapped else 0
    return msgspec.structs.replace(
        kept, values=tuple(values), schedule=schedule.actions, record_from_start=schedule.record_from_start
    )

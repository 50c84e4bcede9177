"""A row for each policy: its plan, its peak, an epoch's losses beside those of in-core, and its steps in pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.against.asking import IN_CORE, Ask
from benchmarks.against.asking import OURS as OUR_METHOD
from benchmarks.against.campaign import budget_bytes
from benchmarks.against.rows import Effort, Wanted, base, facts_of, row_of

from .loss_curve import curve_of
from .recurrent_networks import ALL, OURS

Found = dict[str, Any]
Say = Callable[[str], None]


def measured(name: str, share: str, effort: Effort, say: Say) -> Found:
    """All that is told of a network: of the in-core step, and of each policy at a share of what decisions can move."""
    network = ALL[name]
    facts = facts_of(name, effort)
    in_core = curve_of(Ask(what="curve", network=name, folder=effort.folder), effort.threads)
    against = base(name, IN_CORE, effort)
    found: Found = {
        "network": name,
        "settings": network.settings,
        "epoch_steps": network.epoch_steps,
        "budget_bytes": budget_bytes(facts, share),
        "throttle": effort.throttle,
        **facts,
        "in_core": in_core,
        "rows": [],
    }
    for policy in network.policies:
        row = _row(name, policy, share, found, against, effort)
        found["rows"].append(row)
        say(f"{name} {policy}: {row.get('refused') or row['time']['wall']['median_ratio']}")
    return found


def _row(name: str, policy: str, share: str, found: Found, against: Found, effort: Effort) -> Found:
    wanted = Wanted(name, OUR_METHOD if policy == OURS else policy, share)
    row = row_of(wanted, found["budget_bytes"], against, effort) | {"policy": policy}
    if "refused" in row:
        return row
    plan = "-".join(wanted.key).replace("%", "") + ".json"
    ask = Ask(what="curve", network=name, method=wanted.method, folder=effort.folder, plan=plan)
    curve, in_core = curve_of(ask, effort.threads), found["in_core"]
    row["curve"] = {
        "peak_bytes": curve["peak_bytes"],
        "fallbacks": curve["fallbacks"],
        "losses_equal": curve["losses"] == in_core["losses"],
        "end_equal": curve["end"] == in_core["end"],
        "steps": len(curve["losses"]),
    }
    in_core_s, planned_s = row["time"]["wall"]["median_s"]
    steps = found["epoch_steps"]
    row["epoch_s"] = {"in_core": round(steps * in_core_s, 3), "planned": round(steps * planned_s, 3)}
    return row

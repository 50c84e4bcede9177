"""A row for each policy: its plan, its peak, an epoch's losses beside those of in-core, and its steps in pairs."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.against.asking import IN_CORE, Ask
from benchmarks.against.asking import OURS as OUR_METHOD
from benchmarks.against.campaign import budget_bytes
from benchmarks.against.rows import Effort, Found, Wanted, base, facts_of, row_of
from benchmarks.against.turns import asked

from .recurrent_networks import ALL, OURS

Say = Callable[[str], None]


def measured(name: str, share: str, effort: Effort, say: Say) -> Found:
    """All that is told of a network: of the in-core step, and of each policy at a share of what decisions can move."""
    network = ALL[name]
    facts = facts_of(name, effort)
    in_core = _curve(Ask(what="metered", network=name, folder=effort.folder, steps=network.curve_steps), effort)
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
    given = {"network": name, "method": wanted.method, "folder": effort.folder, "plan": plan}
    curve = _curve(Ask(what="metered", steps=ALL[name].curve_steps, **given), effort)
    in_core = found["in_core"]
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


def _curve(ask: Ask, effort: Effort) -> Found:
    """Losses to the last bit, the state at the end, and the highest peak of steps that are metered and not timed."""
    found = asked(ask, effort.threads)
    return {name: found[name] for name in ("losses", "peak_bytes", "fallbacks")} | {"end": found["bits"][-1]}

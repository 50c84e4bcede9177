"""The same policies on machines that are not here: durations of a roofline, copies of a link's preset."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import poochplan
from benchmarks.pairs import CONFIGS
from poochplan.errors import InfeasibleError
from poochplan.formats.profile import Profile
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.whatif import for_machine
from poochplan.workload import load_workload

from .recurrent_networks import ALL, OURS

DEVICE, LINKS, SHARES = "v100", ("pcie3", "nvlink2"), (0.5, 0.2)
POLICIES = ("earliest-first", "latest-first", "swap-all", "seq2seq", OURS)
GAP = 0.001
"""To the bound: as little as ``make bench`` asks for, so that no policy is ahead by less than what ours may leave."""
Found = dict[str, Any]


def simulated(name: str, time_limit_s: float, say: Callable[[str], None]) -> Found:
    """Overheads of each policy on each link, at each share of what decisions can move."""
    network = ALL[name]
    settings = network.settings | network.large
    profile = _profile(network.config, settings)
    smallest = poochplan.smallest_budget(profile)
    found: Found = {
        "network": name,
        "settings": settings,
        "device": DEVICE,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "smallest_budget_bytes": smallest,
        "saved_values": len({handle.value for handle in profile.handles}),
        "rows": [],
    }
    for link, share in itertools.product(LINKS, SHARES):
        budget_bytes = int(smallest + share * (profile.in_core_peak_bytes - smallest))
        overheads = _overheads(for_machine(profile, link=link), budget_bytes, time_limit_s)
        found["rows"].append({"link": link, "share": share, "budget_bytes": budget_bytes, "overheads": overheads})
        say(f"{name} {DEVICE} {link} at {share:.0%}: {overheads}")
    return found


def _profile(config: str, settings: dict[str, Any]) -> Profile:
    workload = load_workload(str(CONFIGS / f"{config}.toml"), settings).workload
    return poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, mode="fake", roofline=DEVICE
    )


def _overheads(profile: Profile, budget_bytes: int, time_limit_s: float) -> dict[str, float | None]:
    """Overhead of each policy, None for one that does not fit; and the bound below which no plan is."""
    given = PolicyInput.of(profile, budget_bytes)
    found: dict[str, float | None] = {}
    for policy in POLICIES[:-1]:
        plan = run_policy(policy, given)
        fits = plan.peak_bytes <= budget_bytes
        found[policy] = round(plan.simulation.step_s / given.problem.in_core_s - 1, 5) if fits else None
    try:
        ours = poochplan.plan(profile, budget_bytes, time_limit_s=time_limit_s, gap=GAP)
    except InfeasibleError:
        return found | {OURS: None, "bound": None}
    bound_s = ours.solve.bound_s
    bound = None if bound_s is None else round(max(0.0, bound_s / given.problem.in_core_s - 1), 5)
    return found | {OURS: round(ours.prediction.overhead, 5), "bound": bound}

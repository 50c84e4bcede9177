"""A row of the comparison: one method on one network, metered in one process and timed in pairs in two others."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.pairs import compared, in_pairs
from poochplan.planner.policies import policy_names

from .asking import IN_CORE, KEPT, OURS, Ask, base_of
from .methods import BROKEN_CHECKPOINT
from .turns import Partner, RefusedError, asked

Found = dict[str, Any]
EQUAL = "equal"


@dataclass(frozen=True)
class Wanted:
    network: str
    method: str
    at: str = ""
    """A share of what decisions can move, such as ``50%``, or the method whose measured peak is the budget."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.network, self.method, self.at

    @property
    def is_planned(self) -> bool:
        return self.method in (OURS, KEPT, *policy_names())


@dataclass(frozen=True)
class Effort:
    pairs: int
    threads: int
    time_limit_s: float
    folder: str
    """Of profiles and plans."""
    throttle: str = ""
    """The rate to which links are held; empty for none."""


def facts_of(network: str, effort: Effort) -> Found:
    """Profiles the network: its in-core peak and the smallest budget that has a plan, both in allocated bytes."""
    ask = Ask(what="profile", network=network, folder=effort.folder, throttle=effort.throttle)
    return asked(ask, effort.threads)


def base(network: str, method: str, effort: Effort) -> Found:
    """The in-core step that others are compared with: its peak, and its bits after each step."""
    return asked(Ask(what="metered", network=network, method=method, folder=effort.folder), effort.threads)


def row_of(wanted: Wanted, budget_bytes: int, against: Found, effort: Effort) -> Found:
    """The row, or why there is none (``refused``)."""
    row: Found = {"network": wanted.network, "method": wanted.method, "at": wanted.at}
    row |= {"asked_pairs": effort.pairs, "threads": effort.threads, "against": base_of(wanted.method)}
    if wanted.is_planned and wanted.method != KEPT:
        row["budget_bytes"] = budget_bytes
    try:
        if wanted.is_planned:
            row |= asked(_ask("plan", wanted, effort, budget_bytes), effort.threads)
        row |= as_in_core(asked(_ask("metered", wanted, effort), effort.threads), against)
        return row | _timed(wanted, effort)
    except RefusedError as error:
        return row | {"refused": str(error)}


def _ask(what: str, wanted: Wanted, effort: Effort, budget_bytes: int = 0) -> Ask:
    return Ask(
        what=what,
        network=wanted.network,
        method=wanted.method,
        folder=effort.folder,
        plan="-".join(wanted.key).replace("%", "") + ".json",
        budget_bytes=budget_bytes,
        time_limit_s=effort.time_limit_s,
    )


def as_in_core(found: Found, against: Found) -> Found:
    kept = ("peak_bytes", "out_bytes", "in_bytes", "allocator", "fallbacks")
    ours, theirs = found["bits"], against["bits"]
    return {name: found[name] for name in kept} | {
        "in_core_peak_bytes": against["peak_bytes"],
        **{kind: first_difference(ours, theirs, kind) for kind in ("gradients", "buffers")},
    }


def first_difference(ours: list[dict[str, str]], theirs: list[dict[str, str]], kind: str) -> str:
    """``equal``, or the first step, counted from 1, whose digest of that kind is another one."""
    pairs = zip(ours, theirs, strict=True)
    steps = (step for step, (one, other) in enumerate(pairs, 1) if one[kind] != other[kind])
    found = next(steps, None)
    return EQUAL if found is None else f"differ from step {found}"


def _timed(wanted: Wanted, effort: Effort) -> Found:
    """Both processes alternate step by step; the order is drawn anew for each pair."""
    order = random.Random("/".join(wanted.key))
    in_core = Ask(what="turns", network=wanted.network, method=base_of(wanted.method), folder=effort.folder)
    with Partner(_ask("turns", wanted, effort), effort.threads) as method:
        method.answer()  # it has warmed up, and sleeps while the other one does
        with Partner(in_core, effort.threads) as first:
            first.answer()
            pairs = in_pairs(first.step, method.step, effort.pairs, order)
            theirs, ours = first.end(), method.end()
    return {
        "time": compared(pairs),
        "pairs_s": [[round(one[0], 5), round(other[0], 5)] for one, other in pairs],
        "faults": ours["faults"],
        "in_core_faults": theirs["faults"],
        "parameters": EQUAL if ours["digest"] == theirs["digest"] else "differ",
    }


def changes_gradients(row: Found) -> bool:
    return any(row.get(kind, EQUAL) != EQUAL for kind in ("gradients", "parameters"))


def exceeds(row: Found) -> bool:
    """Whether a plan's steps took more than the budget it was given."""
    return "budget_bytes" in row and row.get("peak_bytes", 0) > row["budget_bytes"]


def meets(row: Found, budget_bytes: int) -> bool:
    return "peak_bytes" in row and row["peak_bytes"] <= budget_bytes


def is_honest(row: Found) -> bool:
    """Whether a row counts as an alternative: it ran, and its gradients are those of in-core."""
    return "time" in row and not changes_gradients(row) and row["method"] not in (IN_CORE, BROKEN_CHECKPOINT)

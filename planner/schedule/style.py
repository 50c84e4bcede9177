"""How decisions are turned into a schedule: in general, and value by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Style:
    """How decisions are turned into a schedule."""

    release: Literal["late", "early"] = "late"
    """``late``: when memory asks for it. ``early``: as soon as forward lets go of the value."""
    prefetch: Literal["early", "on_demand"] = "early"
    in_order: bool = True
    """Copies back are queued strictly in the order of need; else a later one may overtake one that has no room yet."""


@dataclass(frozen=True)
class Tuning:
    """What one schedule does otherwise than its style says, where memory permits."""

    replay_at: Mapping[int, int] = field(default_factory=dict)
    """Recomputed value -> use point of its replay, at or before its first use; in this order at one point."""
    stay_until: Mapping[int, int] = field(default_factory=dict)
    """Swapped value -> first point at which it may be released."""
    out_from: Mapping[int, int] = field(default_factory=dict)
    """Swapped value -> first point at which its copy out may be queued."""
    fetch_from: Mapping[int, int] = field(default_factory=dict)
    """Swapped value -> first point at which its copy back may be queued."""
    out_order: tuple[int, ...] = ()
    """The queue outwards; values not in it follow in the style's order."""
    release_order: tuple[int, ...] = ()
    """Which value is released first when memory asks; values not in it follow in the order of the queue."""
    fetch_order: tuple[int, ...] = ()
    """The queue inwards; values not in it follow in the order of need."""


AS_STYLED = Tuning()

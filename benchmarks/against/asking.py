"""What a process of the comparison is asked, as one JSON argument."""

from __future__ import annotations

import msgspec

WARM_STEPS = 6
"""Steps of each process before those that are timed; an arena serves from the fifth."""
METERED_STEPS = 7
OURS, KEPT, IN_CORE, COMPILED = "ours", "kept", "in-core", "compiled"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A network under a method, and what is to be told of it."""

    what: str
    """``profile``, ``plan``, ``metered`` or ``turns``."""
    network: str
    method: str = IN_CORE
    folder: str
    """Where profile and plans lie."""
    plan: str = ""
    """Name of the plan's file in the folder."""
    budget_bytes: int = 0
    time_limit_s: float = 0.0
    steps: int = METERED_STEPS
    """That are metered."""
    throttle: str = ""
    """The rate to which the profile's link is held; empty for none."""


def base_of(method: str) -> str:
    """The in-core step that a method's steps are compared with: compiled ones with compiled ones."""
    return COMPILED if method.startswith(("compile:", "graph:", "compiled-")) else IN_CORE

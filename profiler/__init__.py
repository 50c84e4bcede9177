"""Measures: a step function in, a Profile out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poochplan.formats.profile import Profile

if TYPE_CHECKING:
    from .profiling import profile

__all__ = ["Profile", "profile"]


def __getattr__(name: str) -> Any:
    # Lazy, because the planner reads profiles on machines where importing torch is not worth its seconds.
    if name == "profile":
        from .profiling import profile

        return profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

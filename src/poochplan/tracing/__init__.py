"""Runs one planned step and measures when what happened in it: ops, copies, waits, replays and live bytes."""

from __future__ import annotations

from .traced_step import traced_step

__all__ = ["traced_step"]

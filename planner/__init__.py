"""Decides: a Profile and a budget in, a Plan out. Never imports torch."""

from __future__ import annotations

from .planning import plan
from .schema import Decision, Plan

__all__ = ["Decision", "Plan", "plan"]

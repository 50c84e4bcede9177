"""Decides: a Profile and a budget in, a Plan out. Never imports torch."""

from __future__ import annotations

from .planning import plan, smallest_budget
from .problem import build_problem
from .schedule import schedule_of
from .schema import Decision, Plan
from .simulate import simulate

__all__ = ["Decision", "Plan", "build_problem", "plan", "schedule_of", "simulate", "smallest_budget"]

"""Executes: a Plan and a model in, a training step within the budget out."""

from __future__ import annotations

from .applying import apply
from .session import Session

__all__ = ["Session", "apply"]

"""Executes: a Plan and a model in, a training step within the budget out."""

from __future__ import annotations

from .session import Session, apply

__all__ = ["Session", "apply"]

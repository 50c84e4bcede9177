"""Baseline policies with one interface: each returns a schedule that the simulator has judged and the runtime can run.

Importing this package fills the registry of :mod:`.registry`.
"""

from __future__ import annotations

from . import checkpointing, greedy, pooch, seq2seq, swapping  # noqa: F401
from .registry import PolicyInput, policy_names, run_policy

__all__ = ["PolicyInput", "policy_names", "run_policy"]

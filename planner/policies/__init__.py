"""Baseline policies with one interface: each returns a schedule that the simulator has judged and the runtime can run.

Importing this package fills the registry of :mod:`.registry`.
"""

from __future__ import annotations

from . import checkpointing, greedy, pooch, seq2seq, swapping
from .registry import Policy, PolicyInput, policies, policy_names, run_policy

__all__ = [
    "Policy",
    "PolicyInput",
    "checkpointing",
    "greedy",
    "policies",
    "policy_names",
    "pooch",
    "run_policy",
    "seq2seq",
    "swapping",
]

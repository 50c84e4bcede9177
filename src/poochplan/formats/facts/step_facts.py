"""How a step was run when it was profiled: what decides how much a plan can do for it."""

from __future__ import annotations

import msgspec

from poochplan.formats.checks.fields import Bytes, Count, Text


class StepFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seen in the captured step."""

    modules: Count = 0
    """Of the model, itself included."""
    eval_modules: Count = 0
    """Those of them in eval mode."""
    checkpointed: tuple[Text, ...] = ()
    """Layers whose forward ran again in backward (activation checkpointing), in that order."""
    garbage_bytes: Bytes = 0
    """Of values that only Python's garbage collector frees."""
    kept_bytes: Bytes = 0
    """Of saved tensors that are sparse, nested or of a subclass, which no plan decides about."""
    graph_mode: bool = False
    """Whether ``poochplan.compile`` has compiled the model: what is saved leaves within a compiled forward."""
    unmeasured_regions: Count = 0
    """Runs of compiled regions of which it is not known what they take and give back inside."""
    unmeasured_ops: Count = 0
    """Distinct ops of which the same is not known, where it is of others (mode ``fake``)."""

"""The Profile: what one training step does, op by op and value by value, and what the machine's link costs.

A profile says nothing that only eager mode knows: ops, values, and the points of the runtime's clock. ``profile_parts``
says what each is, and what ticks are.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .checks.profile_faults import profile_faults
from .display.profile_summary import profile_summary
from .display.shown_table import html_table, text_table
from .facts.advice import advice
from .facts.step_facts import StepFacts
from .files import read_struct, write_struct
from .profile_parts import (
    ALLOCATION_UNIT_BYTES,
    ROOFLINE,
    SCHEMA_VERSION,
    Device,
    Handle,
    Host,
    Kind,
    LayerTimes,
    Link,
    LinkDirection,
    Memory,
    ModelSignature,
    Op,
    OpBlock,
    Phase,
    Point,
    PointKind,
    ProfileData,
    RuntimeCost,
    StepTimes,
    Value,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ALLOCATION_UNIT_BYTES",
    "ROOFLINE",
    "SCHEMA_VERSION",
    "Device",
    "Handle",
    "Host",
    "Kind",
    "LayerTimes",
    "Link",
    "LinkDirection",
    "Memory",
    "ModelSignature",
    "Op",
    "OpBlock",
    "Phase",
    "Point",
    "PointKind",
    "Profile",
    "RuntimeCost",
    "StepFacts",
    "StepTimes",
    "Value",
]


class Profile(ProfileData, frozen=True, kw_only=True, dict=True):
    """One training step, measured. See the module's text for ticks."""

    def to_frame(self, kind: Literal["layers", "ops", "values"]) -> pd.DataFrame:
        """The profile as a data frame (pandas). Columns, in bytes and seconds:

        * ``"layers"``: one row per layer with ops or saved values, most saved bytes first; the index is its path.
            ``saved_bytes`` and ``values`` (how many) that autograd saves of it; ``free_bytes``, those of it that are
            not pinned; ``forward_s`` and ``backward_s``, its ops; ``forward_median_s``, ``forward_spread_s``,
            ``backward_median_s`` and ``backward_spread_s``, median and interquartile range of what its ops take
            together in a step, NaN where they were not timed in several steps; ``swap_s``, the free bytes out and
            back in over the link, nothing hidden behind compute; ``recompute_s``, the ops that write its free values,
            each once, NaN where one of the values cannot be recomputed or none is free; ``ratio``, swap over recompute;
            ``live_bytes``, the most that is live at one of its ops, forward or backward.
        * ``"ops"``: one row per op, in order. ``name``, ``layer``, ``phase``, ``tick``, ``duration_s``, ``spread_s``;
            ``inputs``, ``outputs`` and ``writes`` (values); ``born_bytes`` of the outputs, ``workspace_bytes``,
            ``live_bytes`` while it runs, its outputs and workspace included; ``random``, ``opaque``.
        * ``"values"``: one row per value. ``name``, ``layer``, ``kind``, ``size_bytes``, ``dtype``, ``shape``; ``born``
            (op, or -1), ``forward_death`` and ``freed`` (ticks); ``saved``; ``swap_s``, ``recompute_s`` and ``ratio``
            as above, NaN where a value cannot be swapped or recomputed; ``pinned`` and ``unreplayable``, why.

        Raises ``UsageError`` for another kind.
        """
        from .queries import profile_frame  # here, for pandas takes long to load

        return profile_frame(self, kind)

    def reconciliation(self, least: float = 0.0) -> dict[str, str]:
        """How the ops' seconds were brought to those of the uninstrumented step, in words by phase: what its ops take
        timed one by one, what the phase takes, and what was done about the difference.

        Phases without ops, and those that differ by no more than the share ``least``, are left out; so are all where no
        step was timed.
        """
        from .queries import reconciliation

        return reconciliation(self, least)

    def advice(self) -> tuple[str, ...]:
        """What in the way the step is run keeps plans from doing more, and what to do about it: a line each.

        Of a compiled module that holds most of what is saved, activation checkpointing, eval mode, garbage in cycles,
        values that can be neither swapped nor recomputed, and what could not be measured. Empty where there is none.
        """
        return advice(self)

    def _repr_html_(self) -> str:
        """In a notebook: machine, times, peak, what is saved, the link, notes and advice."""
        return html_table(f"Profile of {self.workload}", self._summary())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In IPython: the same in lines; all the ops and values are in the file."""
        printer.text(text_table(f"Profile of {self.workload}", self._summary()))

    def _summary(self) -> list[tuple[str, str]]:
        return [*profile_summary(self), *(("advice", line) for line in self.advice())]

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the profile as JSON (compressed when the name ends in ``.gz``); see ``poochplan.formats.files``."""
        return write_struct(path, self, force=force)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile; raises ``UsageError`` or ``InputFileError`` with one clear line."""
        return read_struct(path, cls, what="profile", schema_version=SCHEMA_VERSION, faults=profile_faults)

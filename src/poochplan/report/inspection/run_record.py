"""RunRecord: what ``pooch run -o`` writes, so that the run can be set beside its plan later and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from poochplan.formats.checks.fields import Bytes, Change, Count, Seconds, Text
from poochplan.formats.files import read_struct, write_struct
from poochplan.formats.plan import Departure
from poochplan.formats.profile import Host, Memory

SCHEMA_VERSION = 1


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, beside what its plan had promised. Bytes and seconds are of one step: medians over steps."""

    kind: Literal["run"] = "run"
    schema_version: int = SCHEMA_VERSION
    workload: Text
    plan_fingerprint: Text
    """``Plan.fingerprint`` of the plan that was followed."""
    versions: dict[Text, Text] = {}
    """Of the run: poochplan, torch, python."""
    host: Host | None = None
    """Where it ran."""
    in_core_peak_bytes: Bytes
    budget_bytes: Bytes
    predicted_peak_bytes: Bytes
    measured_peak_bytes: Bytes | None
    """The largest of any metered step; None when none was metered."""
    in_core_step_s: Seconds
    in_core_step_measured: bool
    """Whether it was measured beside the planned steps; otherwise it is the profile's."""
    predicted_step_s: Seconds
    planned_step_s: Seconds
    """Measured."""
    predicted_overhead: Change
    measured_overhead: Change
    out_bytes: Bytes
    in_bytes: Bytes
    replay_s: Seconds
    replayed_values: Count
    stall_s: Seconds
    contradiction: Text
    """How the measured time contradicts the profile; empty where it does not."""
    fallbacks: Count
    fallback_reasons: tuple[Text, ...]
    departures: tuple[Departure, ...]
    """Where steps left the plan."""
    bitwise_equal: bool | None
    """None when it was not checked."""
    difference: Text | None
    allocated_peak_bytes: Bytes | None
    reserved_peak_bytes: Bytes | None
    arena_bytes: Bytes | None
    arena_live_bytes: Bytes | None
    arena_peak_bytes: Bytes | None = None
    """These three as the plan has them; in all that follows, files that do not say have the default."""
    memory: Memory = Memory.LIVE
    """What the peaks count."""
    predicted_live_peak_bytes: Bytes | None = None
    served_arena_bytes: Bytes | None = None
    """Of the arena that the last steps were served from; None where there was none."""
    served_blocks: Count = 0
    """Of the last step that was served; so are the four that follow."""
    served_bytes: Bytes = 0
    unserved_blocks: Count = 0
    """That lay outside against the plan."""
    unserved_bytes: Bytes = 0
    unserved: tuple[Text, ...] = ()
    """The first of them, and why."""
    why_not_served: Text = ""
    """Why no step was served; empty where one was."""
    steps: Count = 0
    """Under the plan, timed ones too."""
    left_steps: Count = 0
    """That left the plan, wholly or in one value."""

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes it as JSON; never over a file unless ``force``."""
        return write_struct(path, self, force=force)

    @classmethod
    def load(cls, path: str | Path) -> RunRecord:
        """Reads one; raises ``UsageError`` or ``InputFileError`` with one clear line."""
        return read_struct(path, cls, what="run", schema_version=SCHEMA_VERSION)

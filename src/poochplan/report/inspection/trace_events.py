"""A step as trace events: the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the Trace Event Format of Chromium's catapult project: complete events (``"ph": "X"``), counters
(``"C"``) and metadata (``"M"``); times in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from poochplan.formats.files import write_atomic

from .step_trace import TRACKS, StepTrace

_PROCESS = 1
_DIGITS = 3
"""Of microseconds: a nanosecond, so that what ends where the next begins does not overlap it by rounding."""


def trace_events(trace: StepTrace) -> dict[str, Any]:
    """The whole file: a track for each stream that did something, and counters of live bytes and the budget."""
    used = {bar.row for bar in trace.bars}
    tracks = {name: number for number, name in enumerate(TRACKS, 1) if name in used}
    events = [_named("process_name", 0, f"{trace.workload}: one {trace.source} step")]
    for name, number in tracks.items():
        events += [_named("thread_name", number, name), _event("M", "thread_sort_index", number, sort_index=number)]
    for bar in trace.bars:
        start_us, end_us = _microseconds(bar.start_s), _microseconds(bar.end_s)
        label = {"of": bar.label} if bar.label else {}
        complete = _event("X", bar.what, tracks[bar.row], **label)
        events.append(complete | {"cat": bar.row, "ts": start_us, "dur": round(end_us - start_us, _DIGITS)})
    return {
        "traceEvents": [*events, *_counters(trace)],
        "displayTimeUnit": "ms",
        "otherData": {"source": trace.source, "budget_bytes": trace.budget_bytes, **trace.facts},
    }


def write_trace(trace: StepTrace, path: str | Path, *, force: bool = False) -> Path:
    """Writes the trace as JSON, one event a line; never over a file unless ``force``."""
    whole = trace_events(trace)
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in whole.pop("traceEvents"))
    rest = json.dumps(whole, allow_nan=False)
    return write_atomic(path, f'{{"traceEvents": [\n{events}\n],\n{rest[1:]}\n'.encode(), force=force)


def _counters(trace: StepTrace) -> list[dict[str, Any]]:
    sizes, times_s = trace.memory.size_bytes, trace.memory.times_s
    events = []
    before = -1
    for size_bytes, time_s in zip(sizes.tolist(), times_s.tolist()[: len(sizes)], strict=True):
        if size_bytes != before:
            events.append(_event("C", "live bytes", 0, bytes=size_bytes) | {"ts": _microseconds(time_s)})
        before = size_bytes
    if before >= 0:  # the last value holds to the end
        events.append(_event("C", "live bytes", 0, bytes=before) | {"ts": _microseconds(trace.step_s)})
    for time_s in (0.0, trace.step_s):
        events.append(_event("C", "budget", 0, bytes=trace.budget_bytes) | {"ts": _microseconds(time_s)})
    return events


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return _event("M", kind, thread, name=name)


def _event(phase: str, event: str, thread: int, **arguments: str | int | float) -> dict[str, Any]:
    return {"ph": phase, "name": event, "pid": _PROCESS, "tid": thread, "args": arguments}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, _DIGITS)

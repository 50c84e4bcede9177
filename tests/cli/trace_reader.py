"""A strict reader of trace events: refuses what Perfetto would drop or draw wrong, and gives what a test asks about."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NANOSECOND_US = 1e-3
FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
}


@dataclass(frozen=True)
class Slice:
    name: str
    of: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Trace:
    process: str
    tracks: dict[str, list[Slice]]
    counters: dict[str, list[tuple[float, int]]]
    other: dict[str, Any]


def read_trace(path: Path) -> Trace:
    """The trace in the file; every event has exactly its fields, and slices of a track are disjoint or nested."""
    whole = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    process, names = "", dict[int, str]()
    slices, counters = defaultdict[int, list[Slice]](list), defaultdict[str, list[tuple[float, int]]](list)
    for event in whole["traceEvents"]:
        assert set(event) == FIELDS[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                process = event["args"]["name"]
            elif event["name"] == "thread_name":
                assert event["tid"] not in names
                names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "C":
            ((_, size),) = event["args"].items()
            assert isinstance(size, int)
            assert size >= 0
            counters[event["name"]].append((event["ts"], size))
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            end_us = event["ts"] + event["dur"]
            slices[event["tid"]].append(Slice(event["name"], event["args"].get("of", ""), event["ts"], end_us))
    assert set(slices) == set(names), "a track without a name, or without anything on it"
    for name, values in counters.items():
        times = [time for time, _ in values]
        assert times == sorted(times), name
    tracks = {
        names[number]: sorted(found, key=lambda one: (one.start_us, -one.end_us)) for number, found in slices.items()
    }
    for name, found in tracks.items():
        _check_nesting(name, found)
    return Trace(process, tracks, dict(counters), whole["otherData"])


def _check_nesting(track: str, found: list[Slice]) -> None:
    """Perfetto drops a slice of a thread that overlaps another without lying inside of it."""
    open_slices: list[Slice] = []
    for one in found:
        while open_slices and open_slices[-1].end_us <= one.start_us + NANOSECOND_US:
            open_slices.pop()
        if open_slices:
            assert one.end_us <= open_slices[-1].end_us + NANOSECOND_US, (track, open_slices[-1], one)
        open_slices.append(one)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")

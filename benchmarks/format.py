"""How long files take: a synthetic profile of 100,000 ops, written and read, plain and compressed.

    python -m benchmarks.format [--ops 100000] [--repeats 5] [-o benchmarks/results/format.json]

A transformer's step (``tests/planner/random_profiles.py``), repeated, with layer paths and shapes as long as those of
real profiles. Medians over the repeats; the files are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.facts import facts_of_run
from poochplan.formats.profile import Op, Profile, Value
from tests.planner.random_profiles import transformer_like

SHAPE = (32, 12, 1024, 1024)


def synthetic_profile(op_count: int) -> Profile:
    """At least ``op_count`` ops: a step of 8 layers, one after the other as often as that takes."""
    step = transformer_like(8, mib=4)
    copies = range(-(-op_count // len(step.ops)))
    return msgspec.structs.replace(
        step,
        ops=tuple(_op(op, copy, step) for copy in copies for op in step.ops),
        values=tuple(_value(value, copy, step) for copy in copies for value in step.values),
        handles=tuple(
            msgspec.structs.replace(
                handle, value=handle.value + copy * len(step.values), layer=_path(handle.layer, copy), shape=SHAPE
            )
            for copy in copies
            for handle in step.handles
        ),
        points=tuple(
            msgspec.structs.replace(
                point, handle=point.handle + copy * len(step.handles), op=point.op + copy * len(step.ops)
            )
            for copy in copies
            for point in step.points
        ),
    )


def _op(op: Op, copy: int, step: Profile) -> Op:
    shift = copy * len(step.values)
    return msgspec.structs.replace(
        op,
        name=f"aten.{op.name}.default",
        layer=_path(op.layer, copy),
        duration_s=op.duration_s / 7,
        spread_s=float(f"{op.duration_s / 70:.3g}"),
        inputs=tuple(value + shift for value in op.inputs),
        outputs=tuple(value + shift for value in op.outputs),
        writes=tuple(value + shift for value in op.writes),
    )


def _value(value: Value, copy: int, step: Profile) -> Value:
    layer = _path(value.layer, copy)
    return msgspec.structs.replace(
        value,
        name=f"{layer}/{value.name}",
        layer=layer,
        shape=SHAPE,
        born=value.born + copy * len(step.ops) if value.born >= 0 else -1,
        forward_death=value.forward_death + copy * step.tick_count,
        freed=value.freed + copy * step.tick_count,
    )


def _path(layer: str, copy: int) -> str:
    return f"encoder.{copy}.{layer}.attention.output.dense"


def measure(op_count: int, repeats: int) -> dict[str, Any]:
    """Bytes, and median seconds of writing and of reading, for each kind of file."""
    profile = synthetic_profile(op_count)
    result: dict[str, Any] = {
        "ops": len(profile.ops),
        "values": len(profile.values),
        "points": len(profile.points),
        "repeats": repeats,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in ("profile.json", "profile.json.gz"):
            path = Path(folder) / name
            write_s = _median_s(repeats, lambda path=path: profile.save(path, force=True))
            read_s = _median_s(repeats, lambda path=path: Profile.load(path))
            if Profile.load(path) != profile:
                raise AssertionError(f"{name} did not come back as it was")
            result[name] = {"size_bytes": path.stat().st_size, "write_s": write_s, "read_s": read_s}
    return result


def _median_s(repeats: int, call: Callable[[], object]) -> float:
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return median(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = json.dumps(facts_of_run(options) | measure(options.ops, options.repeats), indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()

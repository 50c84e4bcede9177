"""How long files take: a synthetic profile of 100,000 ops, written and read, plain and compressed.

    python -m benchmarks.format [--ops 100000] [--repeats 5] [-o benchmarks/results/format.json]

A transformer's step (``tests/planner/random_profiles.py``), repeated, with layer paths and shapes as long as those of
real profiles. Medians over the repeats; the files are in the page cache when they are read.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from benchmarks.facts import Row, facts_of_run, parser_of, write_results
from poochplan.formats.profile import Op, Profile, Value
from tests.planner.random_profiles import transformer_like

SHAPE = (32, 12, 1024, 1024)


def synthetic_profile(op_count: int) -> Profile:
    """At least ``op_count`` ops: a step of 8 layers, one after the other as often as that takes."""
    step = transformer_like(8, mib=4)
    values, handles, ops = len(step.values), len(step.handles), len(step.ops)
    made: dict[str, list[Any]] = {"ops": [], "values": [], "handles": [], "points": []}
    for copy in range(-(-op_count // ops)):
        made["ops"] += (_op(op, copy, step) for op in step.ops)
        made["values"] += (_value(value, copy, step) for value in step.values)
        for handle in step.handles:
            layer = _path(handle.layer, copy)
            made["handles"].append(replace(handle, value=handle.value + copy * values, layer=layer, shape=SHAPE))
        made["points"] += (replace(p, handle=p.handle + copy * handles, op=p.op + copy * ops) for p in step.points)
    return replace(step, **{name: tuple(parts) for name, parts in made.items()})


def _op(op: Op, copy: int, step: Profile) -> Op:
    shift = copy * len(step.values)
    return replace(
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
    return replace(
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


def measure(op_count: int, repeats: int) -> Row:
    """Bytes, and median seconds of writing and of reading, for each kind of file."""
    profile = synthetic_profile(op_count)
    result: Row = {name: len(getattr(profile, name)) for name in ("ops", "values", "points")} | {"repeats": repeats}
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
    asked = parser_of(__doc__, ops=100_000, repeats=5).parse_args()
    found = facts_of_run(asked) | measure(asked.ops, asked.repeats)
    print(json.dumps(found, indent=2))
    write_results(asked.output, found)


if __name__ == "__main__":
    main()

"""What functions take by the element in code by Inductor, on one core: what the roofline ``cpu-core`` adds to bytes.

    OMP_NUM_THREADS=1 python -m benchmarks.functions -o benchmarks/results/functions.json

Each is compiled over 32,768 numbers of single precision, which the cache holds. Told are the processor's nanoseconds by
the element, the least of seven runs, less what adding 1 takes; and what ``profiler/fake/roofline.py`` says.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.facts import facts_of_run, write_results

ELEMENTS, CALLS, RUNS = 1 << 15, 200, 7


def found() -> list[dict[str, float | str]]:
    """Of each function, measured and told nanoseconds by the element."""
    import torch

    from poochplan.profiler.fake.roofline import DEVICES

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "prims.inductor_random": torch.rand_like,
        "aten.pow": lambda x: x**1.7,
        "aten.tanh": torch.tanh,
        "aten.log1p": torch.log1p,
        "aten.erf": torch.erf,
        "aten.log": torch.log,
        "aten.sigmoid": torch.sigmoid,
        "aten.exp": torch.exp,
        "aten.sin": torch.sin,
        "aten.cos": torch.cos,
    }
    torch.set_num_threads(1)
    numbers = torch.rand(ELEMENTS) + 0.5
    least_ns = _nanoseconds(lambda x: x + 1, numbers)
    told = DEVICES["cpu-core"].element_s
    assert set(told) == set(functions)
    return [
        {
            "function": name,
            "measured_ns": round(_nanoseconds(function, numbers) - least_ns, 2),
            "roofline_ns": round(told[name] * 1e9, 2),
        }
        for name, function in functions.items()
    ]


def _nanoseconds(function: Callable[..., object], numbers: object) -> float:
    import torch

    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=False)
    compiled(numbers)
    runs = []
    for _ in range(RUNS):
        began_s = time.process_time()
        for _ in range(CALLS):
            compiled(numbers)
        runs.append((time.process_time() - began_s) / CALLS)
    return min(runs) / ELEMENTS * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    rows = found()
    for row in rows:
        print(json.dumps(row))
    write_results(given.output, facts_of_run(given) | {"rows": rows})


if __name__ == "__main__":
    main()

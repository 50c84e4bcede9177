"""What functions take by the element in code by Inductor, on one core: what the roofline ``cpu-core`` adds to bytes.

    OMP_NUM_THREADS=1 python -m benchmarks.functions -o benchmarks/results/functions.json

Each is compiled over 32,768 numbers of single precision, which the cache holds. Told are the processor's nanoseconds by
the element, the least of seven runs, less what adding 1 takes; and what ``profiler/fake/roofline.py`` says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from benchmarks.facts import facts_of_run, parser_of, write_results
from poochplan.profiler.fake.roofline import DEVICES

ELEMENTS, CALLS, RUNS = 1 << 15, 200, 7


def found() -> list[dict[str, float | str]]:
    """Of each function, measured and told nanoseconds by the element."""
    names = ("tanh", "log1p", "erf", "log", "sigmoid", "exp", "sin", "cos")
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "prims.inductor_random": torch.rand_like,
        "aten.pow": lambda x: x**1.7,
        **{f"aten.{name}": getattr(torch, name) for name in names},
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
    asked = parser_of(__doc__).parse_args()
    rows = found()
    print(*map(json.dumps, rows), sep="\n")
    write_results(asked.output, facts_of_run(asked) | {"rows": rows})


if __name__ == "__main__":
    main()

"""Run by the kernel of each notebook that the suite executes, before its first cell: the same cells, on less.

What ``make notebooks`` stores is of the notebooks' own sizes. A cell that defines one of these names is run as it is;
from the next one on the name stands for less.
"""

from __future__ import annotations

from typing import Any

SMALLER = {"layers": "2", "batch_size": "4"}
SEARCH_S = 1.0


def make_smaller(names: dict[str, Any]) -> None:
    if "SIZES" in names:
        names["SIZES"] = names["SIZES"] | SMALLER
    if "Solving" in names:
        from poochplan.planner.sweep import Solving

        names["Solving"] = lambda **given: Solving(**given | {"time_limit_s": SEARCH_S})


def start() -> None:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    shell.events.register("post_run_cell", lambda _: make_smaller(shell.user_ns))


start()

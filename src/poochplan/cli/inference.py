"""``pooch profile --inference``: a workload's forward pass alone, and the figures of its layout."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poochplan.errors import UsageError
from poochplan.units import format_seconds

from .base import Verb

if TYPE_CHECKING:
    from poochplan.workload import LoadedWorkload

_OF_STEPS = {
    "roofline": "a pass is measured",
    "throttle": "nothing is copied",
    "spill_dir": "nothing is copied",
    "cached_link": "nothing is copied",
    "accumulate": "there are no gradients",
    "top": "nothing is saved for backward",
}


def add_inference_argument(parser: argparse.ArgumentParser) -> None:
    """``--inference``."""
    parser.add_argument(
        "--inference",
        action="store_true",
        help="the forward pass alone, in eval and without gradients: its peaks, and its layout in one arena",
    )


def check_inference(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` for an option that says something of training steps; before anything is built."""
    for name, why in _OF_STEPS.items():
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: with --inference {why}; drop {option}, or --inference")
    if options.mode not in ("auto", "run"):
        raise UsageError(f"--mode {options.mode}: with --inference the pass is run as it is; drop one of the two")


def profile_inference(verb: Verb, loaded: LoadedWorkload, path: Path) -> dict[str, Any]:
    """Measures, writes and shows the pass; returns what ``--json`` prints."""
    from poochplan.profiler.passes.pass_profiling import profile_pass
    from poochplan.report.tables import summary_table

    options, workload = verb.options, loaded.workload
    start_s = time.perf_counter()
    with verb.progress(f"profiling a forward pass of {loaded.name}") as say:
        found = profile_pass(
            workload.step,
            model=workload.model,
            workload=loaded.name,
            iterations=options.iterations or 5,
            warmup=options.warmup,
            progress=say,
        )
    found.save(path, force=options.force)
    took = format_seconds(time.perf_counter() - start_s)
    verb.show(summary_table(f"Forward pass of {loaded.name}, profiled in {took}", found.rows()))
    verb.wrote(path)
    return {"profile": str(path)} | found.data()

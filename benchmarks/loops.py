"""Whole training loops as they are and under ``poochplan.auto``: seconds in all, and when the plan came.

    python -m benchmarks.loops -o benchmarks/results/loops.json

Each loop in a process of its own: plain, with ``auto`` and empty caches, and with ``auto`` again. Seconds are from
before the ``with`` block to behind it, without imports and the making of the model, which all three share. ``bitwise``:
whether the parameters are those of the plain loop. ``memory_mib``: the most that was resident, less the plain loop's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

from benchmarks.facts import facts_of_run, write_results

LOOPS: dict[str, tuple[str, dict[str, str]]] = {
    "gpt2": ("gpt2", {}),
    "unet3d": ("unet3d", {}),
    "char_rnn": ("char_rnn", {}),
    "bert": ("bert", {}),
    "resnet50": ("resnet50", {"batch_size": "8"}),
    "seq2seq": ("seq2seq", {}),
}
LAST = 20
"""Steps at the end of which the median is told."""


def trained(name: str, budget: str, seconds: float, steps: int) -> dict[str, Any]:
    """The loop in this process: so many ``steps``, or as many as ``seconds`` have room for; plain without a budget."""
    import torch

    import poochplan
    from benchmarks.pairs import load, one_step

    workload = load(*LOOPS[name])
    digest, took, planned = hashlib.sha256(), list[float](), None
    auto = poochplan.auto(workload.model, workload.optimizer, budget=budget) if budget else contextlib.nullcontext()
    torch.manual_seed(0)
    start_s = time.perf_counter()
    with auto as session:
        while len(took) < steps or (not steps and time.perf_counter() - start_s < seconds):
            took.append(one_step(workload)[0])
            if session is not None and planned is None and session.report().steps_followed:
                planned = {"step": len(took), "s": round(time.perf_counter() - start_s, 1)}
    total_s = time.perf_counter() - start_s
    for parameter in workload.model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return {
        "total_s": round(total_s, 2),
        "steps": len(took),
        "last_s": round(median(took[-LAST:]), 4),
        "planned": planned,
        "served": session is not None and session.arena is not None,
        "promised_s": None if session is None or session.plan is None else session.plan.prediction.step_s,
        "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "digest": digest.hexdigest()[:16],
    }


def in_a_process(cache: str, *words: str) -> dict[str, Any]:
    """The same in another one, with that cache folder."""
    command = [sys.executable, "-m", "benchmarks.loops", "--one", *words]
    done = subprocess.run(command, env={**os.environ, "XDG_CACHE_HOME": cache}, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def row_of(name: str, budget: str, seconds: float) -> dict[str, Any]:
    """Plain, first and second run of one loop."""
    with tempfile.TemporaryDirectory() as cache:
        plain = in_a_process(cache, name, "", str(seconds), "0")
        runs = [in_a_process(cache, name, budget, "0", str(plain["steps"])) for _ in range(2)]
    told = {
        key: {
            **{part: run[part] for part in ("total_s", "last_s", "planned", "served", "promised_s")},
            "ratio": round(run["total_s"] / plain["total_s"], 3),
            "last_ratio": round(run["last_s"] / plain["last_s"], 3),
            "memory_mib": run["resident_mib"] - plain["resident_mib"],
            "bitwise": run["digest"] == plain["digest"],
        }
        for key, run in zip(("first", "second"), runs, strict=True)
    }
    return {"loop": name, "steps": plain["steps"], "plain_s": plain["total_s"], "plain_step_s": plain["last_s"], **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of the plain loop (default: 60)")
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--one", nargs=4, metavar=("LOOP", "BUDGET", "SECONDS", "STEPS"), help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    if options.one:
        name, budget, seconds, steps = options.one
        print(json.dumps(trained(name, budget, float(seconds), int(steps))))
        return
    rows = []
    for name in options.loops:
        rows.append(row_of(name, options.budget, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
    write_results(options.output, {**facts_of_run(options), "rows": rows})


if __name__ == "__main__":
    main()

"""What the runtime costs where it has nothing to do: step times in pairs (``pairs.py``), in one process of its own.

python -m benchmarks.overhead keep-all      # a plan that keeps everything against plain PyTorch, and its hooks alone
python -m benchmarks.overhead per-op        # microseconds per recorded op, and per pack and unpack
python -m benchmarks.overhead all -o benchmarks/results/overhead.json
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import poochplan
from benchmarks.facts import facts_of_run, parser_of, write_results
from benchmarks.pairs import CONFIGS, Planned, Seconds, in_pairs, load, one_step, profiled
from benchmarks.processes import POOCH
from poochplan.runtime.replays.compiled_tape import recording
from poochplan.tensors.host_memory import freed_memory_given_back
from poochplan.tensors.storages import static_keys
from poochplan.workload import Workload

KEEP_ALL: dict[str, dict[str, str]] = {"gpt2": {}, "resnet50": {"batch_size": "8"}}
"""A convnet and a transformer whose steps take 0.5 to 1 s on 2 cores."""


def keep_all_plan(name: str, settings: dict[str, str]) -> poochplan.Plan:
    """Made in a process of its own: a profile fixes the C library's allocator, and plain PyTorch does not."""
    with tempfile.TemporaryDirectory() as folder:
        profile, plan = str(Path(folder) / "profile.json"), str(Path(folder) / "plan.json")
        chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        for words in (
            ["profile", str(CONFIGS / f"{name}.toml"), *chosen, "--iterations", "1", "-o", profile],
            ["plan", profile, "--budget", "100%", "--policy", "keep-all", "-o", plan],
        ):
            subprocess.run([*POOCH, *words], check=True, stdout=subprocess.DEVNULL)
        return poochplan.Plan.load(plan)


def keep_all(pairs: int) -> list[dict[str, Any]]:
    """Step time under a plan that keeps everything over that of plain PyTorch."""
    rows = []
    for name, settings in KEEP_ALL.items():
        plan = keep_all_plan(name, settings)
        workload = load(name, settings)
        row = {"workload": name, **settings, **Planned(workload, plan).measure(pairs, pairs)}
        rows.append(row | {"hooks_share_of_step": hooks_share(workload, plan, pairs)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def hooks_share(workload: Workload, plan: poochplan.Plan, steps: int) -> dict[str, float]:
    """CPU seconds inside the session's hooks over those of the step: median and quartiles."""
    spent_s = 0.0

    def timed(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            nonlocal spent_s
            start_s = time.thread_time()
            try:
                return hook(argument)
            finally:
                spent_s += time.thread_time() - start_s

        return run

    shares = []
    with poochplan.apply(plan, workload.model, meter="never"):
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)  # of all hooks only these are called
        with torch.autograd.graph.saved_tensors_hooks(timed(pack), timed(unpack)):
            one_step(workload)
            for _ in range(steps):
                spent_s = 0.0
                _, step_s = one_step(workload)
                shares.append(spent_s / step_s)
    return quartiles(shares, 5)


def quartiles(figures: list[float], digits: int) -> dict[str, float]:
    low, middle, high = (round(float(one), digits) for one in np.percentile(figures, [25, 50, 75]))
    return {"median": middle, "low": low, "high": high}


class ManyOps(nn.Module):
    """Ops so small that a step is nearly all overhead: 6 a layer, 3 of which save something."""

    def __init__(self, layers: int = 100) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(32)) for _ in range(layers))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            batch = torch.tanh(batch * scale + 0.1).sigmoid().relu() + batch
        return batch


@freed_memory_given_back()  # as in a session: fresh memory costs the same in all steps
def per_op(pairs: int) -> dict[str, Any]:
    """Microseconds that recording adds to an op, and that a handle adds to a pack and its unpack."""
    model, batch = ManyOps(), torch.randn(8, 32)
    tape, recorder = recording("cpu")
    tape.static.update(dict.fromkeys(static_keys(model, "cpu"), 0))
    ops = 6 * len(model.scales)

    def forward(mode: contextlib.AbstractContextManager[Any]) -> Seconds:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        with mode, torch.no_grad():
            model(batch)
        return time.perf_counter() - start_s, time.thread_time() - start_cpu_s

    def step() -> Seconds:
        model.zero_grad(set_to_none=True)
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        model(batch).sum().backward()
        return time.perf_counter() - start_s, time.thread_time() - start_cpu_s

    @contextlib.contextmanager
    def recorded_forward() -> Any:
        tape.forget()
        recorder.switch_on()
        try:
            yield
        finally:
            recorder.switch_off()

    recorded = in_pairs(lambda: forward(contextlib.nullcontext()), lambda: forward(recorded_forward()), pairs)
    workload = Workload(model, lambda: model(batch).sum(), torch.optim.SGD(model.parameters(), lr=0.0))
    profile = profiled(workload, "many-ops", iterations=3)
    plan = poochplan.plan(profile, profile.in_core_peak_bytes, policy="keep-all")
    with poochplan.apply(plan, model, meter="never") as session:

        def plain() -> Seconds:
            with session.away():
                return step()

        steps = in_pairs(plain, step, pairs)
    of_ops = [(first_s, second_s) for (_, first_s), (_, second_s) in recorded]
    of_handles = [(second_s - first_s) / len(plan.handles) for (_, first_s), (_, second_s) in steps]
    return {
        "ops": ops,
        "handles": len(plan.handles),
        "plain_us_per_op": quartiles([1e6 * first_s / ops for first_s, _ in of_ops], 2),
        "recording_us_per_op": quartiles([1e6 * (second_s - first_s) / ops for first_s, second_s in of_ops], 2),
        "pack_and_unpack_us_per_handle": quartiles([1e6 * seconds for seconds in of_handles], 2),
    }


def main() -> None:
    parser = parser_of(__doc__, pairs=20, threads=1)
    parser.add_argument("what", choices=("keep-all", "per-op", "all"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = facts_of_run(arguments)
    if arguments.what in ("keep-all", "all"):
        found["keep_all"] = keep_all(arguments.pairs)
    if arguments.what in ("per-op", "all"):
        found["per_op"] = per_op(max(50, arguments.pairs))
        print(json.dumps(found["per_op"]), flush=True)
    write_results(arguments.output, found)


if __name__ == "__main__":
    main()

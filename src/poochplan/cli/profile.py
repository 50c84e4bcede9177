"""``pooch profile``: measures a workload's training step and the link."""

from __future__ import annotations

import argparse
import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poochplan.errors import UsageError
from poochplan.formats.profile import Phase, Profile
from poochplan.formats.queries import movable_bytes
from poochplan.planner.simulator.evaluator import begin_build
from poochplan.report.tables import file_data, frame_table, plain_rows, summary_table
from poochplan.units import format_seconds, format_with_spread

from .base import Verb
from .options import parse_overrides

if TYPE_CHECKING:
    from poochplan.online.ranks import Ranks
    from poochplan.workload import LoadedWorkload

_OF_STEPS = {
    "roofline": "a pass is measured",
    "throttle": "nothing is copied",
    "spill_dir": "nothing is copied",
    "cached_link": "nothing is copied",
    "accumulate": "there are no gradients",
    "top": "nothing is saved for backward",
}
"""Options for training steps, and why a forward pass has no use for each."""


class ProfileVerb(Verb):
    name = "profile"
    has_ranks = True
    help = """
Runs the workload's training step a few times and writes a profile: the time of every op, the lifetime of every saved
value, the in-core peak, and the link in both directions. If the step does not fit in-core, every saved value is swapped
meanwhile. WORKLOAD is the name of a shipped config, such as unet3d, or a TOML file, package.module:function or
path/to/file.py:function. With --mode fake the step runs without memory and data, so that a step that fits on no machine
can be planned. Each distinct op is then timed by itself on this machine, or --roofline gives durations and link.
--inference profiles the forward pass alone, in eval mode and without gradients, as poochplan.arena(model) runs it.

<workload>
-o, --output >FILE: profile to write (default: NAME.profile.json)
<of workload>
--device NAME: cpu, cuda, cuda:N or another accelerator of torch: the workload's parameter `device` (default: its own)
--mode auto|run|swap-all|fake =auto: run: the real step, in-core; swap-all: the real step with every saved value on the
  host, for a step that does not fit; fake: without memory, each op timed by itself or by --roofline; auto: run if the
  step fits, otherwise swap-all, and fake with --roofline (default: {})
--roofline DEVICE: for mode fake: v100, a100, h100, h200, p100, titan-x, cpu-core, or FLOPS,BYTES such as 50e12,2e12
--iterations N: timed steps; medians are stored (default: 5; mode fake times none)
--warmup N >=0 =2: steps before the timed ones (default: {})
--inference: the forward pass alone, in eval mode and without gradients: its peaks, and its layout in one arena
<spill dir>
--throttle RATE: on the CPU: limit copies to a rate such as 400MB/s, here and in runs of its plans
--cached-link: use the link that `pooch link` has measured; measure it if there is none
--accumulate: your loop has no zero_grad between these steps, so gradients exist already in forward
--nproc N >=2: measure on N ranks at once, as torchrun starts them: each wraps the model for data-parallel training, and
  all copy at the same time, beside an all-reduce; the profile is that of rank 0
--top N >=0 =0: show the N layers that save the most bytes, and the cost of swapping or recomputing them

pooch profile unet3d -o profile.json
pooch profile train.py:workload --set batch_size=64 --top 10
pooch profile gpt2 --device cuda -o gpu.json
pooch profile gpt2 --set layers=48 --mode fake --roofline v100
pooch profile gpt2 --nproc 2 -o two-ranks.json
pooch profile resnet50 --inference -o pass.json
pooch profile model.onnx --loss cross-entropy --set batch=32 -o profile.json
pooch profile my_package.models:build --throttle 400MB/s --spill-dir /scratch --json | jq .in_core_peak_bytes
"""

    def execute(self) -> int:
        """With ``--nproc`` torchrun runs the same command on every rank, and rank 0 writes and prints."""
        if self.options.nproc is None or self.rank_count > 1:
            return super().execute()
        self._check_mode()
        self.check_outputs()
        return _on_ranks(self.options.nproc, self.options.arguments)

    def run(self) -> dict[str, Any]:
        with self.ranks() as ranks:
            return self._run(ranks)

    def _run(self, ranks: Ranks | None) -> dict[str, Any]:
        options = self.options
        self._check_mode()
        begin_build()  # while torch is loaded
        loaded = self._load()
        path = options.output or self.output(f"{loaded.name}.{'pass' if options.inference else 'profile'}.json")
        if options.inference:
            return _profile_inference(self, loaded, path)
        start_s = time.perf_counter()
        profile = self._measure(loaded, ranks)
        if profile is None:  # rank 0 has it
            return {}
        took = format_seconds(time.perf_counter() - start_s)
        self.show(summary_table(f"Profile of {loaded.name}, taken in {took}", profile.rows()))
        layers = self._top_layers(profile) if options.top else []
        self.write(path, Profile.save, lambda: profile)
        return profile_data(profile, path) | ({"layers": layers} if options.top else {})

    def _check_mode(self) -> None:
        """Checks the mode before torch is loaded and a model is built."""
        options = self.options
        if options.nproc is not None or self.rank_count > 1:
            self._check_ranks()
        if options.inference:
            _check_inference(options)
        if self._is_fake() and options.iterations is not None:
            raise UsageError("--iterations: mode fake times no steps; drop --iterations, or take --mode run")
        if self._is_fake() and options.roofline is not None:
            for name, value in (("--throttle", options.throttle), ("--spill-dir", options.spill_dir)):
                if value is not None:
                    raise UsageError(f"{name}: a roofline moves no bytes, its link is a preset; drop {name}")
            if options.cached_link:
                raise UsageError("--cached-link: a roofline's link is a preset; drop --cached-link")
            from poochplan.profiler.fake.roofline import parse_roofline

            parse_roofline(options.roofline)
        elif options.roofline is not None:
            raise UsageError(f"--roofline: mode {options.mode} measures durations; drop it, or add --mode fake")

    def _check_ranks(self) -> None:
        options = self.options
        for is_given, option, why in (
            (self._is_fake(), "--mode fake" if options.mode == "fake" else "--roofline", "a step without memory"),
            (options.inference, "--inference", "a forward pass"),
            (options.cached_link, "--cached-link", "a link that one process has measured"),
        ):
            if is_given:
                raise UsageError(
                    f"--nproc: expected steps of several ranks, found {option}: {why}; drop one of the two"
                )

    def _is_fake(self) -> bool:
        return self.options.mode == "fake" or (self.options.mode == "auto" and self.options.roofline is not None)

    def _load(self) -> LoadedWorkload:
        if not self._is_fake():
            return load(self.options, self.rank)
        from poochplan.profiler.fake.fake import building

        with building():
            return load(self.options)

    def _measure(self, loaded: LoadedWorkload, ranks: Ranks | None) -> Profile | None:
        """The profile; None on ranks above 0, which run the steps that rank 0 measures."""
        import torch

        from poochplan.profiler.profiling import profile
        from poochplan.profiler.request import stage_share

        options, workload = self.options, loaded.workload
        where = next((parameter.device for parameter in workload.model.parameters()), torch.device("cpu"))
        with self.progress(f"profiling {loaded.name}") as say:
            link = None
            if options.cached_link:
                from poochplan.profiler.link import cached_link

                say("the link")
                link, _ = cached_link(where, options.spill_dir, options.throttle)
            step = workload.step
            if ranks is not None:
                from poochplan.online.ranks import data_parallel
                from poochplan.profiler.link import measure_link

                workload = data_parallel(workload)
                count, least = self.rank_count, ranks.least
                with ranks.reducing(where) as beside:
                    rates = options.spill_dir, options.throttle
                    link = measure_link(where, *rates, ranks=count, least=least, beside=beside)
                if self.rank > 0:
                    ranks.follow(workload, accumulate=options.accumulate)
                    return None
                step = ranks.led(workload.step)
            measured = profile(
                step,
                model=workload.model,
                optimizer=workload.optimizer,
                workload=loaded.name,
                link=link,
                progress=lambda text: say(text, stage_share(text)),
                **self.given("iterations", "warmup", "accumulate", "mode", "roofline", "spill_dir", "throttle"),
            )
            if ranks is not None:
                ranks.end_steps()
            return measured

    def _top_layers(self, profile: Profile) -> list[dict[str, Any]]:
        top = profile.to_frame("layers").head(self.options.top)
        headings = {
            "saved_bytes": "saved",
            "forward": "forward",
            "backward": "backward",
            "swap_s": "swap",
            "recompute_s": "recompute",
            "ratio": "swap/rec.",
        }
        spread = {
            phase: [format_with_spread(*pair) for pair in zip(top[f"{phase}_s"], top[f"{phase}_spread_s"], strict=True)]
            for phase in ("forward", "backward")
        }
        self.show(frame_table(f"The {len(top)} layers that save most", top.assign(**spread), headings))
        return plain_rows(top)


def load(options: argparse.Namespace, rank: int = 0) -> LoadedWorkload:
    """The workload of the options, with a seed of its own for each rank; raises the errors of ``load_workload``."""
    overrides = parse_overrides(options)
    from poochplan.runtime.devices.opening import usable_device
    from poochplan.verify import seed_everything
    from poochplan.workload import load_workload

    if options.device is not None:
        usable_device(options.device)
    seed_everything(options.seed + rank)
    return load_workload(options.workload, overrides, options.device)


def _on_ranks(count: int, arguments: list[str]) -> int:
    """Has torchrun start ``pooch`` with these arguments on that many ranks; returns the exit code of the first that
    failed, else 0.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    config = LaunchConfig(1, 1, count, run_id=str(uuid.uuid4()), rdzv_endpoint="localhost:0", rdzv_backend="c10d")
    config.max_restarts = 0
    try:
        elastic_launch(config, sys.executable)("-m", "poochplan", *arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except SignalException:
        raise KeyboardInterrupt from None
    return 0


def profile_data(profile: Profile, path: Path) -> dict[str, Any]:
    """The data of ``pooch profile --json``: the figures of the summary, in bytes and seconds."""
    times, link = profile.times, profile.link
    return {
        "profile": str(path),
        "workload": profile.workload,
        "device": profile.device.name,
        "mode": profile.mode,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "in_core_peak_layer": profile.in_core_peak_layer,
        "plain_step_s": times.plain_step_s,
        "in_core_step_s": times.step_s,
        "unserved_step_s": times.unserved_step_s,
        **{f"{phase}_s": getattr(times, f"{phase}_s") for phase in Phase},
        "spread_s": times.spread_s,
        **{f"{phase}_spread_s": getattr(times, f"{phase}_spread_s") for phase in Phase},
        "reconciliation": profile.reconciliation(),
        "static_bytes": profile.static_bytes,
        "optimizers": [
            {"name": one.name, "movable_bytes": movable_bytes(profile, one), "separable": one.separable}
            for one in profile.optimizers
        ],
        "saved_bytes": sum(value.size_bytes for value in profile.values if value.kind == "activation"),
        "out_bandwidth_bytes_per_s": link.outward.bandwidth_bytes_per_s,
        "in_bandwidth_bytes_per_s": link.inward.bandwidth_bytes_per_s,
        "notes": list(profile.notes),
    }


def _check_inference(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` for options that are only for training steps, before the workload is built."""
    for name, why in _OF_STEPS.items():
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: with --inference {why}; drop {option}, or --inference")
    if options.mode not in ("auto", "run"):
        raise UsageError(f"--mode {options.mode}: with --inference the pass is run as it is; drop one of the two")


def _profile_inference(verb: Verb, loaded: LoadedWorkload, path: Path) -> dict[str, Any]:
    """Measures, writes and shows the pass; returns the data for ``--json``."""
    from poochplan.profiler.pass_profiling import profile_pass

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
    verb.show(summary_table(f"Forward pass of {loaded.name}, profiled in {took}", found.rows()), f"Wrote {path}")
    return {"profile": str(path)} | file_data(found)

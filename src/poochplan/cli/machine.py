"""``pooch doctor`` and ``pooch link``: verbs that check and measure the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd
from rich.table import Table
from rich.text import Text

from poochplan.errors import UsageError
from poochplan.formats.profile import LinkDirection
from poochplan.formats.queries import link_rows
from poochplan.report.tables import frame_table, summary_table
from poochplan.units import format_bytes

from .base import Verb
from .profile import load

if TYPE_CHECKING:
    from poochplan.doctor import Finding

_STYLE = {"ok": "green", "warning": "yellow", "missing": "bold red", "failed": "bold red"}


class DoctorVerb(Verb):
    name = "doctor"
    help = """
Checks threads, memory, huge pages, the spill disk (32 MiB are written and removed), the noise of the machine, torch,
CUDA and CuPy, the solvers, and the parts that are compiled on first use (the planner's evaluator and the allocator).
Each line is ok, warning, missing or failed, and says what to do. WORKLOAD is built, and its model is checked: train
mode, compiled parts, activation checkpointing, optimizer, and whether the in-core step fits. With --gpu a GPU is tried
for some seconds: versions, pinning, copies, events, overlap, bits, allocator, launches; the last line is the verdict.
Exit code 1: something needed is missing, or a check failed.

WORKLOAD?: as in pooch profile (default: none)
<of workload>
--device NAME: cpu, cuda, cuda:N or another accelerator of torch, as in pooch profile
<spill dir>
--build: build evaluator and allocator now (default: on their first use)
--gpu: try the GPU that --device names (default: cuda), in under 30 seconds

pooch doctor --gpu
pooch doctor unet3d --spill-dir /scratch
pooch doctor
pooch doctor --build
pooch doctor train.py:workload --set batch_size=64 --json | jq '.findings[] | select(.status != "ok")'
"""

    def run(self) -> dict[str, Any]:
        from poochplan.doctor import Status, machine_findings, software_findings, workload_findings

        options = self.options
        with self.progress("looking at the machine"):
            findings = [*software_findings(builds=options.build), *machine_findings(options.spill_dir)]
        if options.workload is not None:
            with self.progress(f"looking at {options.workload}"):
                findings += workload_findings(load(options).workload)
        if options.gpu:
            findings += self._gpu_findings(options.device or "cuda")
        self._show(findings)
        counts = {str(status): sum(one.status is status for one in findings) for status in Status}
        self.exit_code = int(counts[Status.MISSING] + counts[Status.FAILED] > 0)
        return {"findings": msgspec.to_builtins(findings), "counts": counts}

    def _gpu_findings(self, name: str) -> list[Finding]:
        from poochplan.doctor_gpu import gpu_findings
        from poochplan.runtime.devices.opening import usable_device

        where = usable_device(name)
        if where.type != "cuda":
            raise UsageError(f"--gpu: expected cuda or cuda:N as --device, found {name}; leave --gpu out for the CPU")
        with self.progress(f"trying {where}"):
            return list(gpu_findings(where))

    def _show(self, findings: list[Finding]) -> None:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for one in findings:
            words = f"{one.found}\n-> {one.advice}" if one.advice else one.found
            table.add_row(Text(str(one.status), style=_STYLE[one.status]), one.name, Text(words))
        self.show(table)


class LinkVerb(Verb):
    name = "link"
    help = """
Copies buffers of 64 KiB to 1 GiB out and back in: alone, together and beside compute. On CUDA the buffers are pinned;
pageable ones are measured for comparison. On the CPU the host tier is a spill file, which is written once before. The
result is kept in the user's cache folder, by device, disk, throttle and torch version. The next call shows it from
there.

--device NAME =cpu: cpu, cuda, cuda:N or another accelerator of torch (default: {})
<spill dir>
--throttle RATE: limit copies to a rate such as 400MB/s
--refresh: measure again instead of using the cache

pooch link --spill-dir /scratch
pooch link --device cuda --refresh
pooch link --throttle 400MB/s --json | jq .outward.bandwidth_bytes_per_s
"""

    def run(self) -> dict[str, Any]:
        options = self.options
        from poochplan.profiler.link import cache_path, cached_link
        from poochplan.runtime.devices.opening import usable_device

        where = usable_device(options.device)
        if where.type != "cpu" and options.throttle is not None:
            raise UsageError(
                f"--throttle: expected the CPU, found {where}, whose copies cannot be slowed; leave it out"
            )
        with self.progress("measuring the link"):
            link, was_cached = cached_link(where, options.spill_dir, options.throttle, refresh=options.refresh)
        source = f"from {cache_path()}; --refresh measures again" if was_cached else "measured now"
        self.show(summary_table(f"Link ({link.name}), {source}", link_rows(link)))
        headings = {"out_s": "out", "out_rate": "out GB/s", "in_s": "in", "in_rate": "in GB/s"}
        self.show(frame_table("Copies alone, medians", _curve_frame(link.outward, link.inward), headings))
        if link.pageable_out is not None and link.pageable_in is not None:
            pageable = _curve_frame(link.pageable_out, link.pageable_in)
            self.show(frame_table("Copies of pageable memory, which no plan makes", pageable, headings))
        data: dict[str, Any] = msgspec.to_builtins(link)
        return data | {"cached": was_cached}


def _curve_frame(outward: LinkDirection, inward: LinkDirection) -> pd.DataFrame:
    rows = {
        format_bytes(size): (out_s, size / out_s / 1e9, in_s, size / in_s / 1e9)
        for (size, out_s), (_, in_s) in zip(outward.curve, inward.curve, strict=True)
    }
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["out_s", "out_rate", "in_s", "in_rate"])
    return frame.rename_axis("size")

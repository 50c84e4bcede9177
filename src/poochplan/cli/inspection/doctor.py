"""``pooch doctor``: looks at machine, software and a workload, and says what to do about what it finds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from poochplan.cli.base import SPILL_DIR_HELP, Verb
from poochplan.cli.profile import add_workload_arguments, load

if TYPE_CHECKING:
    from poochplan.doctor.finding import Finding

_STYLE = {"ok": "green", "warning": "yellow", "missing": "bold red"}


class DoctorVerb(Verb):
    """Runs checks; each gives one line."""

    name = "doctor"
    summary = "look at the machine, the software and a workload: what is fine, what to change, what to install"
    description = (
        "Looks at threads, memory, huge pages, the spill disk (64 MiB are written and removed), the noise of the "
        "machine, torch, CUDA and CuPy, the solvers and what is compiled on first use (the evaluator of plans and the "
        "allocator); each line is ok, warning or missing, and says what to do. With WORKLOAD it is built, and its "
        "model is looked at: train mode, compiled parts, activation checkpointing, optimizer, and whether the in-core "
        "step fits. Exit code 1: something needed is missing."
    )
    examples = """\
  pooch doctor unet3d --spill-dir /scratch
  pooch doctor
  pooch doctor --build
  pooch doctor train.py:workload --set batch_size=64 --json | jq '.findings[] | select(.status != "ok")'
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help="as of pooch profile (default: none)")
        add_workload_arguments(parser)
        parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N, as of pooch profile")
        parser.add_argument("--spill-dir", metavar="DIR", help=SPILL_DIR_HELP)
        parser.add_argument(
            "--build", action="store_true", help="build evaluator and allocator now (default: on their first use)"
        )

    def run(self) -> dict[str, Any]:
        import msgspec

        from poochplan.doctor.finding import Status
        from poochplan.doctor.machine_checks import machine_findings
        from poochplan.doctor.software_checks import software_findings
        from poochplan.doctor.workload_checks import workload_findings

        options = self.options
        with self.progress("looking at the machine"):
            findings = [*software_findings(builds=options.build), *machine_findings(options.spill_dir)]
        if options.workload is not None:
            with self.progress(f"looking at {options.workload}"):
                findings += workload_findings(load(options).workload)
        self._show(findings)
        counts = {str(status): sum(one.status is status for one in findings) for status in Status}
        self.exit_code = int(counts[Status.MISSING] > 0)
        return {"findings": msgspec.to_builtins(findings), "counts": counts}

    def _show(self, findings: list[Finding]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for one in findings:
            words = f"{one.found}\n-> {one.advice}" if one.advice else one.found
            table.add_row(Text(str(one.status), style=_STYLE[one.status]), one.name, Text(words))
        self.show(table)

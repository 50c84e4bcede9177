"""How large a batch trains within a memory: on a V100 of 16 GiB by its roofline, and for real on this machine's CPU.

    python -m benchmarks.fit v100 -o benchmarks/results/fit.json     # 15.5 GiB, nvlink2: no step is run
    python -m benchmarks.fit cpu -o benchmarks/results/fit-cpu.json  # real profiles; the value found is run, bit by bit

Of the memory 0.5 GiB is set aside, as in PoocH's setting (``settings.py``). Beside the ladder of ``pooch fit``
there are rungs at 2 and 4.7 times the largest in-core batch; the latter is what TFLMS reached with ResNet-50. Rows that
the results file has of other networks than ``--networks`` stay in it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from torch import nn

from benchmarks import networks
from benchmarks.facts import Row, facts_of_run, known_rows, parser_of, table_row, write_results
from benchmarks.instances import classifier
from poochplan import Workload, fit
from poochplan.fitting.probes import Machine, Probes, family_of
from poochplan.workloads import sequence, unrolled, volume

MEMORY, MARGIN, LINK, DEVICE = "16GiB", "0.5GiB", "nvlink2", "v100"
MULTIPLES = (2.0, 4.7)
ASKED = {"resnet50": 4.7, "seq2seq": 30.0, "seq2seq-steps": 30.0, "resnet164-cifar": 30.0}
"""Times the in-core batch; of the 3D U-Nets a batch of 4 was asked for."""


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm and a ReLU in place; the shortcut is padded with zeros (option A)."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if width_in == width else 2
        self.conv1, self.bn1 = nn.Conv2d(width_in, width, 3, self.stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.added = nn.ReLU(inplace=True), width - width_in

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(features)))))
        if self.added:
            features = nn.functional.pad(features[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added))
        out += features
        result: torch.Tensor = self.relu(out)
        return result


def cifar_resnet(batch_size: int = 64, blocks: int = 27) -> Workload:
    """The residual network for images of 32x32 of K. He et al., 2015, section 4.2: 6 ``blocks`` + 2 layers."""
    widths = [16] * (blocks + 1) + [32] * blocks + [64] * blocks
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    body = [Block(one, other) for one, other in itertools.pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return classifier(nn.Sequential(*stem, *body, *head), (batch_size, 3, 32, 32), 10)


def resnet50(batch_size: int = 64) -> Workload:
    return classifier(networks.resnet50(), (batch_size, 3, 224, 224), 1000)


def unet3d(batch_size: int = 1) -> Workload:
    return volume.unet3d(side=192, batch_size=batch_size)


def unet3d_half(batch_size: int = 1) -> Workload:
    """The same with half the channels: of 32 at full size, four volumes alone exceed the memory in one convolution."""
    return volume.unet3d(side=192, batch_size=batch_size, features=(16, 16, 32, 64, 128, 16))


def seq2seq(batch_size: int = 64) -> Workload:
    return sequence.seq2seq(
        batch_size=batch_size, sequence_length=64, vocabulary=32000, width=1024, layers=4, heads=8, dropout=0.2
    )


def seq2seq_steps(batch_size: int = 64) -> Workload:
    """Characters in place of words, and attention at each step: what attention saves is most of the memory."""
    return unrolled.seq2seq_steps(batch_size=batch_size, sequence_length=128, width=512)


LARGE: dict[str, Callable[..., Workload]] = {
    "resnet50": resnet50,
    "unet3d-192": unet3d,
    "unet3d-192-half": unet3d_half,
    "seq2seq": seq2seq,
    "seq2seq-steps": seq2seq_steps,
    "resnet164-cifar": cifar_resnet,
}
_GPT2 = {"batch_size": 2, "sequence_length": 128, "width": 128, "heads": 4, "vocabulary": 512}
HERE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "seq2seq": ("seq2seq", "batch_size", "48MiB", {"width": 64, "sequence_length": 64}),
    "char_rnn": ("char_rnn", "sequence_length", "24MiB", {"batch_size": 8, "width": 128}),
    "gpt2": ("gpt2", "layers", "48MiB", _GPT2),
}


def large(name: str, limits: Row) -> Row:
    """One network on the V100: the fit, and rungs at the multiples of the in-core batch."""
    found = fit(
        LARGE[name], "batch_size", MEMORY, roofline=DEVICE, link=LINK, margin=MARGIN, progress=print, **limits,
    )  # fmt: skip
    machine = Machine(found.budget_bytes, DEVICE, LINK)
    probes = Probes(family_of(LARGE[name], "batch_size"), machine, print, limits)
    wanted = {str(multiple): round(multiple * (found.in_core_value or 0)) for multiple in MULTIPLES}
    at = {multiple: asdict(probes.rung(value)) for multiple, value in wanted.items() if 0 < value <= found.value}
    return figures_of(found) | {"at": at, "asked": ASKED.get(name)}


def here(name: str, limits: Row) -> Row:
    """One workload on this machine: what real profiles found, and the run of it."""
    workload, parameter, memory, settings = HERE[name]
    found = fit(workload, parameter, memory, settings=settings, progress=print, **limits)
    assert found.trial is not None
    return figures_of(found) | {"at": {}, "trial": asdict(found.trial)}


def figures_of(found: Any) -> Row:
    return {name: getattr(found, name) for name in ("parameter", "budget_bytes", "in_core_value", "value", "best")} | {
        "ratio": found.times_in_core,
        "following": None if found.following is None else asdict(found.following),
        "rungs": [asdict(rung) for rung in found.rungs],
        "notes": list(found.notes),
    }


def line(row: dict[str, Any]) -> str:
    largest = row["rungs"][-1]
    at = [row["at"].get(str(multiple)) for multiple in MULTIPLES]
    return table_row(
        row["network"], row["in_core_value"], row["value"], "" if row["ratio"] is None else f"{row['ratio']:.1f}",
        *("" if rung is None else _overhead(rung) for rung in at), _overhead(largest), row["best"] or "",
    )  # fmt: skip


def _overhead(rung: dict[str, Any]) -> str:
    bound = "" if rung["bound_overhead"] is None else f" (bound {rung['bound_overhead']:.1%})"
    return f"{rung['overhead']:.1%}{bound}"


def main() -> None:
    parser = parser_of(__doc__, time_limit=10.0, gap=(0.005, "a plan is done within this of the bound"))
    parser.add_argument("what", choices=("v100", "cpu"))
    parser.add_argument("--networks", nargs="+", choices=[*LARGE, *HERE], help="default: all")
    arguments = parser.parse_args()
    every, one = (LARGE, large) if arguments.what == "v100" else (HERE, here)
    rows = {row["network"]: row for row in known_rows(arguments.output)}
    facts, limits = facts_of_run(arguments), {"time_limit_s": arguments.time_limit, "gap": arguments.gap}
    for name in arguments.networks or every:
        started_s = time.perf_counter()
        row = {"network": name, **one(name, limits), "wall_s": time.perf_counter() - started_s}
        rows[name] = row | {"commit": facts["commit"], "time_limit_s": arguments.time_limit}
        print(line(rows[name]), flush=True)
        write_results(arguments.output, {**facts, "rows": [rows[name] for name in every if name in rows]})


if __name__ == "__main__":
    main()

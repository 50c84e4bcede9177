"""MONeT's setting (Shah et al., "Memory Optimization for Deep Networks", ICLR 2021, table 1): a third of the memory.

    python -m benchmarks.monet -o benchmarks/results/monet.json

ResNet-50 with 184 images and a U-Net with 11 images of 416x608, fp32; the budget is the share of the in-core peak that
MONeT published (4.99 of 15.06 GB, 5.01 of 14.32 GB). Durations are a V100's by roofline, theirs a P100's as measured.
``recompute`` may swap nothing, as MONeT; ``hybrid`` swaps too, over pcie3.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch

from benchmarks import networks
from benchmarks.facts import facts_of_run, write_results
from benchmarks.instances import Instance, classifier, profile_of
from poochplan import Profile
from poochplan.errors import InfeasibleError
from poochplan.planner import for_machine, plan
from poochplan.workload import Workload


def segmentation() -> Workload:
    """Cross entropy over pixels, two classes, SGD with momentum."""
    model, images = networks.unet(), torch.randn(11, 3, 416, 608)
    labels = torch.randint(2, (11, 416, 608))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, lambda: torch.nn.functional.cross_entropy(model(images), labels), optimizer)


CASES = {
    "resnet50-b184": (lambda: classifier(networks.resnet50(), (184, 3, 224, 224), 1000), 4.99 / 15.06, 0.1195),
    "unet-b11": (segmentation, 5.01 / 14.32, 0.115),
}
"""Network -> what builds it, the share of memory, and the overhead that MONeT published."""


def profile_of_case(name: str) -> Profile:
    """The step of one of :data:`CASES` on a V100 with pcie3."""
    return for_machine(profile_of(Instance(CASES[name][0], name), name, "v100"), link="pcie3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per plan")
    parser.add_argument("--gap", type=float, default=0.001)
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (_, share, published) in CASES.items():
        profile = profile_of_case(name)
        budget_bytes = int(share * profile.in_core_peak_bytes)
        for kind, host_budget in (("recompute", 0), ("hybrid", None)):
            limits = {"time_limit_s": arguments.time_limit, "gap": arguments.gap}
            row = {"network": name, "kind": kind, "in_core_peak_bytes": profile.in_core_peak_bytes}
            rows.append({**row, "budget_bytes": budget_bytes, "published": published})
            try:
                found = plan(profile, budget_bytes, host_budget=host_budget, **limits)
            except InfeasibleError as error:
                print(f"{name}, {kind}: {error}", flush=True)
                continue
            rows[-1] |= {
                "overhead": found.prediction.overhead,
                "bound": (found.solve.bound_s or 0.0) / found.prediction.in_core_step_s - 1,
                "gap": found.solve.gap,
                "wall_s": found.solve.wall_s,
            }
            print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        write_results(arguments.output, {**facts_of_run(arguments), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Networks captured as the compiler's graphs and as eager ops, both without memory: peak, plan, bound and gap.

    OMP_NUM_THREADS=1 python -m benchmarks.graph_capture -o benchmarks/results/graph_capture.json

Simulated: a V100's roofline behind PCIe 3. What is never in memory once the compiler has fused it counts no bytes and
no seconds in the graphs (``profiler/graphs/fusion.py``), so that recomputing costs less there and less is saved.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.facts import facts_of_run, write_results

NETWORKS: dict[str, tuple[str, dict[str, str]]] = {
    "resnet50 b256": ("resnet50", {"batch_size": "256", "image_size": "224"}),
    "gpt2 medium": (
        "gpt2",
        {
            "batch_size": "8",
            "sequence_length": "1024",
            "layers": "24",
            "width": "1024",
            "heads": "16",
            "vocabulary": "50257",
        },
    ),
}
SHARES = (0.6, 0.4)
TIME_LIMIT_S = 30.0


def rows(name: str) -> list[dict[str, Any]]:
    from benchmarks.pairs import load
    from poochplan.profiler.fake.fake import building

    config, settings = NETWORKS[name]
    found = []
    for kind in ("eager", "graphs"):
        with building():
            work = load(config, settings)
        if kind == "graphs":
            work.model.compile(dynamic=False)
        found.append(_row(name, kind, work))
    return found


def _row(name: str, kind: str, work: Any) -> dict[str, Any]:
    import poochplan
    from poochplan.formats.plan import Decision
    from poochplan.planner.planning import smallest_budget

    began_s = time.perf_counter()
    profile = poochplan.profile(work.step, model=work.model, optimizer=work.optimizer, mode="fake", roofline="v100")
    capture_s = time.perf_counter() - began_s
    peak_bytes = profile.in_core_peak_bytes
    saved = {handle.value for handle in profile.handles}
    plans = []
    for share in SHARES:
        plan = poochplan.plan(profile, int(share * peak_bytes), time_limit_s=TIME_LIMIT_S)
        decided = {str(one): sum(value.decision is one for value in plan.values) for one in Decision}
        plans.append(
            {
                "share": share,
                "overhead": round(plan.prediction.overhead, 4),
                "gap": None if plan.solve.gap is None else round(plan.solve.gap, 4),
                "decided": decided,
            }
        )
    return {
        "network": name,
        "captured": kind,
        "capture_s": round(capture_s, 1),
        "ops": len(profile.ops),
        "in_core_peak_bytes": peak_bytes,
        "saved_bytes": sum(profile.values[number].size_bytes for number in saved),
        "in_core_step_s": round(profile.times.step_s, 5),
        "smallest_share": round(smallest_budget(profile) / peak_bytes, 4),
        "plans": plans,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in given.networks:
        found += rows(name)
        write_results(given.output, facts_of_run(given) | {"rows": found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Do predictions come true: the step beside PyTorch alone, and the peak, of plans at three budgets for six networks.

The link is held to a known rate, so that what is judged is the profile, the simulator and the runtime, not the disk.
Steps by PyTorch alone and planned ones run in a process each, and alternate (``against/rows.py``); so do two that both
run PyTorch alone, once for each network. The peak is metered by the tests' own hook of the allocator.

    python -m benchmarks.prediction [--models t5,swin] [-o benchmarks/results/prediction.json]

Networks that are left out stay in the results file as they are.
"""

from __future__ import annotations

import sys
import tempfile

from benchmarks.against.asking import IN_CORE, OURS
from benchmarks.against.campaign import budget_bytes
from benchmarks.against.rows import Effort, Found, Wanted, base, facts_of, row_of
from benchmarks.facts import MIB, facts_of_run, known_rows, parser_of, table_row, write_results

CHOSEN = ("llama", "t5", "swin", "mobilenet_v2", "whisper", "monai_basicunet")
BUDGETS = ("75%", "40%", "10%")
"""Of the bytes between the smallest feasible budget and the in-core peak, the share that is there."""
NEAR = 0.10


def rows_of(name: str, effort: Effort) -> list[Found]:
    network = f"models.{name}"
    facts, against = facts_of(network, effort), base(network, IN_CORE, effort)
    alone = row_of(Wanted(network, IN_CORE), 0, against, effort)
    rows = []
    for share in BUDGETS:
        row = row_of(Wanted(network, OURS, share), budget_bytes(facts, share), against, effort)
        rows.append(facts | row | _judged(row) | {"network": name, "alone": alone["time"]})
        print(line_of(rows[-1]), flush=True)
    return rows


def _judged(row: Found) -> Found:
    if "refused" in row:
        return {}
    wall, processor, ratio = row["time"]["wall"], row["time"]["cpu"]["median_ratio"], row["predicted_ratio"]
    promised_bytes = row["arena_peak_bytes"] if row["holds_arena"] else row["predicted_peak_bytes"]
    return {
        "measured_over_predicted": round(wall["median_ratio"] / ratio, 5),
        "interval_95": [round(bound / ratio, 5) for bound in wall["interval_95"]],
        "processor_over_predicted": round(processor / ratio, 5),
        "is_near_by_processor": abs(processor / ratio - 1) <= NEAR,
        "is_near": abs(wall["median_ratio"] / ratio - 1) <= NEAR,
        "promised_bytes": promised_bytes,
        "peak_is_near": row["peak_bytes"] <= 1.01 * promised_bytes + MIB,
    }


def line_of(row: Found) -> str:
    if "refused" in row:
        return table_row(row["network"], row["at"], row["refused"])
    wall, alone = row["time"]["wall"], row["alone"]["wall"]
    seconds = [row["plain_step_s"], wall["median_s"][0], row["predicted_step_s"], wall["median_s"][1]]
    budget = f"{row['budget_bytes'] / MIB:.0f} MiB{'' if row['holds_arena'] else ', no arena'}"
    return table_row(
        row["network"],
        f"{row['at']} ({budget})",
        *(f"{ratio:.3f}" for ratio in (row["predicted_ratio"], wall["median_ratio"])),
        "{:.3f} ({:.3f} to {:.3f})".format(row["measured_over_predicted"], *row["interval_95"]),
        f"{row['processor_over_predicted']:.3f}",
        "{:.3f} ({:.3f} to {:.3f})".format(alone["median_ratio"], *alone["interval_95"]),
        ", ".join(f"{1000 * one:.0f}" for one in seconds),
        f"{row['promised_bytes'] / MIB:.1f} / {row['peak_bytes'] / MIB:.1f}",
        row["fallbacks"],
    )


def main() -> int:
    parser = parser_of(
        __doc__,
        models=",".join(CHOSEN),
        throttle="400MB/s",
        pairs=(20, "pairs of steps for each plan"),
        time_limit=10.0,
        threads=1,
    )
    arguments = parser.parse_args()
    facts, names = facts_of_run(arguments), arguments.models.split(",")
    rows = [row for row in known_rows(arguments.output) if row["network"] not in names]
    with tempfile.TemporaryDirectory() as folder:
        effort = Effort(arguments.pairs, arguments.threads, arguments.time_limit, folder, arguments.throttle)
        for name in names:
            rows += [row | {"commit": facts["commit"]} for row in rows_of(name, effort)]
            write_results(arguments.output, facts | {"rows": rows})
    near, whole = (sum(row.get(key, False) for row in rows) for key in ("is_near", "peak_is_near"))
    print(f"of {len(rows)} plans, {near} steps came true within 10%, and {whole} peaks are at most 1% + 1 MiB above")
    return 0 if near == whole == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

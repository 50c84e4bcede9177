"""Char-RNN and Seq2Seq over an epoch: the policies that were published for them against swap-all and ours.

Char-RNN reads text of 285 KB and 4.4 MB, as large as the data sets of "Improving TensorFlow's Memory Swapping by
Prioritizing Earlier Tensors" (Alvaro, Kistijantoro, 2019), and is run under that work's policy, ``earliest-first``. The
unrolled Seq2Seq is run under ``seq2seq``. Beside each, ``swap-all`` and ours (``ilp``), all within one budget: the
smallest possible one and a share of the way to the in-core peak.

* Time: steps in pairs with the in-core step, each side a process of its own, as ``benchmarks/compare.py`` takes them.
  An epoch's seconds are the median step's times the steps of an epoch.
* Peak and losses: of runs that are not timed, over an epoch (of the large text, over its first chunks), by the tests'
  meter. Losses are compared to the last bit, and so is the state of model and generator at the end.
* Simulated: overheads with sizes of a GPU, durations of a V100's roofline and two links.

    python -m benchmarks.char_rnn --pairs 20 -o benchmarks/results/char_rnn.json
    python -m benchmarks.char_rnn --table benchmarks/results/char_rnn.json

Parts that are left out (``--only``, NETWORK) stay in the results file as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.against.rows import Effort
from benchmarks.epochs.epoch_rows import measured
from benchmarks.epochs.epoch_table import tables
from benchmarks.epochs.recurrent_networks import ALL, RECURRENT
from benchmarks.epochs.simulated_links import simulated
from benchmarks.facts import facts_of_run, write_results


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("networks", nargs="*", default=list(RECURRENT), metavar="NETWORK", help=f"of {', '.join(ALL)}")
    add("--only", choices=("measured", "simulated"), help="leave the other part as it is")
    add("--share", type=float, default=0.5, help="measured: of what decisions can move (default: 0.5)")
    add("--pairs", type=int, default=3, help="pairs of steps (default: 3)")
    add("--threads", type=int, default=1, help="of each process (default: 1)")
    add("--time-limit", type=float, default=10.0, help="seconds for a plan of ours (default: 10)")
    add("--throttle", default="", metavar="RATE", help="measured: hold copies to a rate, such as 40MB/s")
    add("--note", default="", help="said of what this run takes, such as: other work ran beside it")
    add("--table", help="show the tables of this file, and take nothing")
    add("-o", "--output", help="the results file, to begin or to go on with")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.networks if name not in ALL]
    if unknown:
        parser.error(f"expected networks of {', '.join(ALL)}, found {', '.join(unknown)}")
    return arguments


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def taken(arguments: argparse.Namespace, commit: str) -> dict[str, list[dict[str, Any]]]:
    """What this run is to take, each network with its seconds, the commit and the note."""
    found: dict[str, list[dict[str, Any]]] = {"measured": [], "simulated": []}
    with tempfile.TemporaryDirectory() as folder:
        effort = Effort(arguments.pairs, arguments.threads, arguments.time_limit, folder, arguments.throttle)
        share = f"{100 * arguments.share:g}%"
        for name in arguments.networks:
            for part in found:
                if arguments.only not in (None, part) or (part == "simulated" and not ALL[name].large):
                    continue
                began_s = time.perf_counter()
                took = (
                    measured(name, share, effort, say)
                    if part == "measured"
                    else simulated(name, arguments.time_limit, say)
                )
                wall_s = round(time.perf_counter() - began_s, 1)
                run = {"pairs": arguments.pairs, "note": arguments.note, "commit": commit, "wall_s": wall_s}
                found[part].append({**took, **run})
    return found


def joined(known: dict[str, Any], new: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The new rows in place of those of the same network; in the order of the networks."""
    order = list(ALL)
    return {
        part: sorted(
            {one["network"]: one for one in (*known.get(part, []), *rows)}.values(),
            key=lambda one: order.index(one["network"]),
        )
        for part, rows in new.items()
    }


def main() -> int:
    arguments = arguments_of()
    if arguments.table:
        print(tables(json.loads(Path(arguments.table).read_text(encoding="utf-8"))))
        return 0
    facts = facts_of_run(arguments)
    output = Path(arguments.output) if arguments.output else None
    known = json.loads(output.read_text(encoding="utf-8")) if output and output.exists() else {}
    found = joined(known, taken(arguments, facts["commit"]))
    write_results(output, facts | found)
    print(tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any

import poochplan
from benchmarks.against.asking import IN_CORE, Ask
from benchmarks.against.asking import OURS as OUR_METHOD
from benchmarks.against.campaign import budget_bytes
from benchmarks.against.compared_networks import OF_EPOCHS as ALL
from benchmarks.against.compared_networks import RECURRENT
from benchmarks.against.rows import Effort, Found, Wanted, base, facts_of, row_of
from benchmarks.against.turns import asked
from benchmarks.facts import MIB, facts_of_run, known_rows, parser_of, write_results
from benchmarks.pairs import load, profiled
from benchmarks.plans import budget_of, costs_of, policy_overhead
from poochplan.errors import InfeasibleError
from poochplan.formats.profile import Profile
from poochplan.planner.policies import PolicyInput
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.whatif import for_machine

OURS = "ilp"
DEVICE, LINKS, SHARES = "v100", ("pcie3", "nvlink2"), (0.5, 0.2)
POLICIES = ("earliest-first", "latest-first", "swap-all", "seq2seq", OURS)
GAP = 0.001
"""To the bound: as little as ``make bench`` asks for, so that no policy is ahead by less than what ours may leave."""
Say = Callable[[str], None]


def measured(name: str, share: str, effort: Effort, say: Say) -> Found:
    """All that is told of a network: of the in-core step, and of each policy at a share of what decisions can move."""
    network = ALL[name]
    facts = facts_of(name, effort)
    in_core = _curve(Ask(what="metered", network=name, folder=effort.folder, steps=network.curve_steps), effort)
    against = base(name, IN_CORE, effort)
    found: Found = {
        "network": name,
        "settings": network.settings,
        "epoch_steps": network.epoch_steps,
        "budget_bytes": budget_bytes(facts, share),
        "throttle": effort.throttle,
        **facts,
        "in_core": in_core,
        "rows": [],
    }
    for policy in network.policies:
        row = _row(name, policy, share, found, against, effort)
        found["rows"].append(row)
        say(f"{name} {policy}: {row.get('refused') or row['time']['wall']['median_ratio']}")
    return found


def _row(name: str, policy: str, share: str, found: Found, against: Found, effort: Effort) -> Found:
    wanted = Wanted(name, OUR_METHOD if policy == OURS else policy, share)
    row = row_of(wanted, found["budget_bytes"], against, effort) | {"policy": policy}
    if "refused" in row:
        return row
    plan = "-".join(wanted.key).replace("%", "") + ".json"
    steps = ALL[name].curve_steps
    ask = Ask(what="metered", network=name, method=wanted.method, folder=effort.folder, plan=plan, steps=steps)
    curve = _curve(ask, effort)
    in_core = found["in_core"]
    row["curve"] = {
        "peak_bytes": curve["peak_bytes"],
        "fallbacks": curve["fallbacks"],
        "losses_equal": curve["losses"] == in_core["losses"],
        "end_equal": curve["end"] == in_core["end"],
        "steps": len(curve["losses"]),
    }
    in_core_s, planned_s = row["time"]["wall"]["median_s"]
    times = {"in_core": in_core_s, "planned": planned_s}
    row["epoch_s"] = {kind: round(found["epoch_steps"] * step_s, 3) for kind, step_s in times.items()}
    return row


def _curve(ask: Ask, effort: Effort) -> Found:
    """Losses to the last bit, the state at the end, and the highest peak of steps that are metered and not timed."""
    found = asked(ask, effort.threads)
    return {name: found[name] for name in ("losses", "peak_bytes", "fallbacks")} | {"end": found["bits"][-1]}


def simulated(name: str, time_limit_s: float, say: Say) -> Found:
    """Overheads of each policy on each link, at each share of what decisions can move."""
    network = ALL[name]
    settings = network.settings | network.large
    profile = profiled(load(network.config, settings), "", mode="fake", roofline=DEVICE)
    found: Found = {
        "network": name,
        "settings": settings,
        "device": DEVICE,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "smallest_budget_bytes": poochplan.smallest_budget(profile),
        "saved_values": len({handle.value for handle in profile.handles}),
        "rows": [],
    }
    for link, share in product(LINKS, SHARES):
        budget_bytes = budget_of(profile, share)
        overheads = _overheads(for_machine(profile, link=link), budget_bytes, time_limit_s)
        found["rows"].append({"link": link, "share": share, "budget_bytes": budget_bytes, "overheads": overheads})
        say(f"{name} {DEVICE} {link} at {share:.0%}: {overheads}")
    return found


def _overheads(profile: Profile, budget_bytes: int, time_limit_s: float) -> dict[str, float | None]:
    """Overhead of each policy, None for one that does not fit; and the bound below which no plan is."""
    given = PolicyInput(Problem.of(profile), budget_bytes)
    found = {policy: policy_overhead(policy, given) for policy in POLICIES[:-1]}
    try:
        costs = costs_of(poochplan.plan(profile, budget_bytes, time_limit_s=time_limit_s, gap=GAP))
    except InfeasibleError:
        return found | {OURS: None, "bound": None}
    return found | {OURS: costs["overhead"], "bound": None if costs["bound"] is None else max(0.0, costs["bound"])}


# -- tables ------------------------------------------------------------------------------------------------------------

_NAMES = {OURS: "ours (`ilp`)"}
_MEASURED = (
    "| network | policy | epoch in-core, planned (s) | step over in-core, 95% | processor | predicted | peak, budget, "
    "in-core (MiB) | losses |\n|---|---|---|---|---|---|---|---|"
)
_SIMULATED = (
    "| network | in-core, budget (GiB) | link | earliest-first | latest-first | swap-all | seq2seq | ours | bound |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def tables(found: dict[str, Any]) -> str:
    parts = ((_MEASURED, measured_lines, found["measured"]), (_SIMULATED, simulated_lines, found["simulated"]))
    return "\n\n".join("\n".join([head, *chain.from_iterable(map(lines, some))]) for head, lines, some in parts if some)


def measured_lines(network: dict[str, Any]) -> list[str]:
    return [_measured_line(network, row) for row in network["rows"]]


def _measured_line(network: dict[str, Any], row: dict[str, Any]) -> str:
    policy = _NAMES.get(row["policy"], row["policy"])
    if "refused" in row:
        return f"| {network['network']} | {policy} | | {row['refused']} | | | | |"
    times, wall, curve = row["epoch_s"], row["time"]["wall"], row["curve"]
    policy += ", from an arena" if row["allocator"] == "arena" else ""
    low, high = (value - 1 for value in wall["interval_95"])
    processor = row["time"]["cpu"]["median_ratio"] - 1
    bytes_shown = (curve["peak_bytes"], network["budget_bytes"], network["in_core"]["peak_bytes"])
    peaks = ", ".join(f"{size_bytes / MIB:.1f}" for size_bytes in bytes_shown)
    return (
        f"| {network['network']} | {policy} | {times['in_core']:.1f}, {times['planned']:.1f} "
        f"| **{wall['median_ratio'] - 1:+.1%}** [{low:+.1%}, {high:+.1%}] | {processor:+.1%} "
        f"| {row['predicted_ratio'] - 1:+.1%} | {peaks} | {_losses(curve)} |"
    )


def _losses(curve: dict[str, Any]) -> str:
    if not (curve["losses_equal"] and curve["end_equal"]):
        return "**differ**"
    return f"all {curve['steps']} equal to the bit"


def simulated_lines(network: dict[str, Any]) -> list[str]:
    lines = []
    gib = 1024 * MIB
    for row in network["rows"]:
        shown = [_overhead(row["overheads"][name]) for name in (*POLICIES, "bound")]
        sizes = f"{network['in_core_peak_bytes'] / gib:.2f}, {row['budget_bytes'] / gib:.2f} ({row['share']:.0%})"
        cells = " | ".join((*shown[:-2], f"**{shown[-2]}**", shown[-1]))
        lines.append(f"| {network['network']} | {sizes} | {network['device']}, {row['link']} | {cells} |")
    return lines


def _overhead(value: float | None) -> str:
    return "none fits" if value is None else f"{value:.1%}"


# -- the command ------------------------------------------------------------------------------------------------------


def arguments_of() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        share=(0.5, "measured: of what decisions can move"),
        pairs=3,
        threads=1,
        time_limit=(10.0, "seconds for a plan of ours"),
        note=("", "said of what this run takes, such as: other work ran beside it"),
        table=(None, "show the tables of this file, and take nothing"),
    )
    add = parser.add_argument
    add("networks", nargs="*", default=list(RECURRENT), metavar="NETWORK", help=f"of {', '.join(ALL)}")
    add("--only", choices=("measured", "simulated"), help="leave the other part as it is")
    add("--throttle", default="", metavar="RATE", help="measured: hold copies to a rate, such as 40MB/s")
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
    known = {part: known_rows(arguments.output, part) for part in ("measured", "simulated")}
    found = joined(known, taken(arguments, facts["commit"]))
    write_results(arguments.output, facts | found)
    print(tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Our plans against what a user would pick instead, on the CPU device: step time, peak, bytes moved, bits.

For each network: everything kept from an arena (``kept``), ``torch.utils.checkpoint`` per block (``checkpoint``) and
selective (``sac``), ``save_on_cpu``, ``OffloadActivations``, Rockmate, and with ``--compile`` ``torch.compile`` with
``activation_memory_budget`` (``compile:0.5``), compiled checkpointing, and ours within compiled code (``graph:0.6``).
Ours (``ours``: policy ``ilp``, from an arena) and other policies run at each budget, and ours once more at the measured
peak of checkpointing and of selective checkpointing.

A budget of 50% is the smallest possible one and 50% of the way to the in-core peak of allocated bytes. Step times are
compared in pairs with the method's own in-core step, each side a process of its own, asleep while the other one steps.
Peaks and bits come from runs that are not timed, by the tests' meter, which shares no code with the package.

    python -m benchmarks.compare --pairs 20 --picture docs/images/compare.png -o benchmarks/results/compare.json

It goes on where the file ends: rows that have as many pairs are not taken again, unless with ``--redo``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from benchmarks.against.campaign import Campaign, wanted_rows
from benchmarks.against.compare_picture import draw
from benchmarks.against.compare_table import one_line, put_into_page, short_table, table, verdicts
from benchmarks.against.compared_networks import NETWORKS, TINY
from benchmarks.against.methods import METHODS, method_of
from benchmarks.against.rows import Effort, Wanted
from benchmarks.facts import PACKAGES, facts_of_run, parser_of
from poochplan.planner.policies import policy_names

COMPILED_NETWORKS = ("gpt2", "resnet50")


def arguments_of() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        budgets=("50%,30%", "shares of what decisions can move"),
        pairs=3,
        threads=(os.cpu_count(), "of each process; all cores unless told otherwise"),
        time_limit=12.0,
        redo=(False, "take rows anew that the file has already"),
        note=("", "said of the rows that this run takes, such as: other work ran beside them"),
        show=(False, "take nothing; table, page and picture from the file"),
        picture=(None, "write the picture here"),
        page=(None, "put the table between the marks of this Markdown page"),
        readme=(None, "put a short table between the marks of this Markdown page"),
    )
    add = parser.add_argument
    add("networks", nargs="*", default=list(NETWORKS), metavar="MODEL", help=f"of {', '.join(NETWORKS | TINY)}")
    add("--policies", default="", help=f"other policies of ours: {', '.join(policy_names())}")
    add("--methods", default="", help=f"only these: {', '.join(METHODS)}, compile:0.5, graph:0.6 or a policy")
    add("--compile", action="store_true", help=f"torch.compile too, on {' and '.join(COMPILED_NETWORKS)}; takes long")
    return parser.parse_args()


def wanted_of(arguments: argparse.Namespace) -> list[Wanted]:
    """All rows that were asked for, in order; unknown networks and methods are errors."""
    shares, policies = arguments.budgets.split(","), _names(arguments.policies)
    methods = _names(arguments.methods)
    for name in (*methods, *policies):
        try:
            method_of(name)
        except KeyError:
            raise SystemExit(f"expected a method of {', '.join(METHODS)} or a policy, found {name!r}") from None
    rows: list[Wanted] = []
    for network in arguments.networks:
        if network not in NETWORKS | TINY:
            raise SystemExit(f"expected a network of {', '.join(NETWORKS | TINY)}, found {network!r}")
        compiled = arguments.compile and network in COMPILED_NETWORKS
        found = list(wanted_rows(network, shares, policies, compiled))
        extra = [name for name in methods if name not in {row.method for row in found}]
        found += [Wanted(network, name) for name in extra]
        rows += [row for row in found if not methods or row.method in methods]
    return rows


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> None:
    arguments = arguments_of()
    wanted, shares = wanted_of(arguments), arguments.budgets.split(",")
    with tempfile.TemporaryDirectory() as folder:
        effort = Effort(arguments.pairs, arguments.threads, arguments.time_limit, folder)
        facts = facts_of_run(arguments, (*PACKAGES, "transformers", "monai"))
        campaign = Campaign(effort, arguments.output, facts, arguments.note)
        for one in [] if arguments.show else wanted:
            began_s = time.perf_counter()
            print(one_line(campaign.take(one, arguments.redo)), f"({time.perf_counter() - began_s:.0f} s)", flush=True)
    text = table(campaign.found)
    print(text, *verdicts(campaign.found, shares), sep="\n")
    if arguments.page:
        put_into_page(Path(arguments.page), text)
    if arguments.readme:
        put_into_page(Path(arguments.readme), short_table(campaign.found, shares[-1]))
    if arguments.picture:
        draw(campaign.found, shares, Path(arguments.picture))


if __name__ == "__main__":
    main()

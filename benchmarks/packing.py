"""What a static arena would need, and what PyTorch's caching allocator would reserve, for plans of the instances.

    python -m benchmarks.packing -o benchmarks/results/packing.json
    python -m benchmarks.packing --source -o benchmarks/results/packing-source.json    # networks of 2018, in-core

Plans of policy ``greedy`` at three budgets (``kept`` as in ``planning.py``) and in-core. The allocator is the model of
``planner/arena/caching_allocator.py``, fed three steps. Compared are everything through the allocator, and an arena of
its own for the buffers of fetched values, or of fetched and replayed ones. One arena for the whole step is packed three
times: quickly, as along with a plan, and with ``THOROUGH`` looks.

Then, in-core, a training step and its forward pass alone: an arena, the allocator's model, a pool that gives a freed
block only to one of its size, and all blocks laid apart. ``--source`` has this alone, of the networks that a paper of
2018 on packing would take ("Profile-guided memory optimization", Sekiyama et al.), the pass in eval mode.
"""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import accumulate, product
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import fit, networks
from benchmarks.facts import Row, facts_of_run, parser_of, table_head, table_row, write_results
from benchmarks.instances import Instance, classifier, profile_of
from benchmarks.planning import NETWORKS, instance
from benchmarks.plans import budget_of
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, Phase, Profile
from poochplan.planner.arena.caching_allocator import ROUND_LARGE_BYTES, peak_reserved
from poochplan.planner.arena.packing import LOOKS_PER_BLOCK, THOROUGH, Block, Packing, live_peak, pack
from poochplan.planner.arena.step_layout import blocks_of, taken_by
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.simulator.problem import Problem
from poochplan.workload import Workload

LINKS = ("pcie3", "nvlink2")
KEPT = (0.7, 0.3, 0.1)
PHASES = ("training", "forward")
SOURCE = {
    "AlexNet": (networks.alexnet, 224),
    "GoogLeNet": (networks.googlenet, 224),
    "ResNet-50": (networks.resnet50, 224),
    "Inception-ResNet": (networks.inception_resnet, 299),
}
"""Networks for images, and the side of these. Beside them the Seq2Seq of ``fit.py``."""
SOURCE_BATCHES = (1, 32, 128)
PACKED = (
    ("packed", "step_arena_bytes", "pack_s"),
    ("along with a plan", "step_planned_bytes", "planned_s"),
    ("quick", "step_quick_bytes", "quick_s"),
)
"""How thoroughly, and what the bytes and the seconds of it are called."""


def timed(blocks: tuple[Block, ...], looks: int | None) -> tuple[Packing, float]:
    """A packing, and the seconds of processor time that it took."""
    started_s = time.process_time()
    packing = pack(blocks, looks)
    return packing, time.process_time() - started_s


@cache
def loaded_s() -> float:
    """Seconds of processor time in which this process loads the compiled code: first fit does not do for these five."""
    units = ((1, 4, 2), (0, 2, 2), (1, 3, 2), (0, 1, 3), (3, 6, 3))
    return timed(tuple(Block(start, end, 512 * size) for start, end, size in units), None)[1]


def one(network: str, link: str, kept: float) -> Row:
    """One plan: bytes live, packed and reserved; ``kept`` of 1 is the in-core step."""
    profile = instance(network, link)
    problem = PolicyInput(Problem.of(profile), 0).problem
    budget_bytes = budget_of(profile, kept)
    plan = run_policy("keep-all" if kept == 1 else "greedy", PolicyInput(problem, budget_bytes))
    blocks = blocks_of(problem, plan.schedule)
    step = blocks.of_step
    row: Row = {"network": network, "link": link, "kept": kept, "blocks": len(step), "load_s": loaded_s()}
    looks = (THOROUGH, LOOKS_PER_BLOCK * len(step), None)
    for (_, name, seconds), most in zip(PACKED, looks, strict=True):
        packing, row[seconds] = timed(step, most)
        row |= {name: packing.arena_bytes, "step_live_bytes": packing.lower_bound_bytes}
    everything = peak_reserved(blocks.before, step, blocks.end)

    def apart(own: tuple[Block, ...], rest: tuple[Block, ...]) -> int:
        arena_bytes = -(-pack(own).arena_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        return peak_reserved(blocks.before, rest, blocks.end).reserved_bytes + arena_bytes

    def in_order(*parts: Iterable[Block]) -> tuple[Block, ...]:
        return tuple(sorted((block for part in parts for block in part), key=lambda block: block.start))

    return row | {
        "fetched": len(blocks.fetched),
        "replayed": len(blocks.replayed),
        "live_bytes": live_peak(blocks.before + step),
        "allocated_bytes": everything.allocated_bytes,
        "reserved_bytes": everything.reserved_bytes,
        "fetched_apart_bytes": apart(blocks.fetched, in_order(blocks.by_ops, blocks.replayed)),
        "own_apart_bytes": apart(in_order(blocks.fetched, blocks.replayed), blocks.by_ops),
    }


def forward_blocks(profile: Profile) -> tuple[tuple[Block, ...], int]:
    """What a forward pass without grad takes, and its end: what forward makes dies when the last but autograd lets go,
    or as its last op of forward is done.
    """
    ops = [(op, tick) for op, tick in zip(profile.ops, profile.op_ticks, strict=True) if op.phase is Phase.FORWARD]
    taken = [taken_by(profile, op) for op, _ in ops]
    starts = [0, *accumulate(max(1, len(own)) for own in taken)]
    ticks = [tick for _, tick in ops]
    used = {value: at for at, (op, _) in enumerate(ops) for value in (*op.inputs, *op.outputs, *op.writes)}
    last = len(ops) - 1
    blocks = []
    for at, ((op, _), own) in enumerate(zip(ops, taken, strict=True)):
        for number, block in enumerate(own):
            if block.until >= 0:
                end = starts[at] + block.until
            elif block.output < 0:
                end = starts[-1]
            else:
                value = op.outputs[block.output]
                held = bisect_right(ticks, profile.values[value].forward_death) - 1
                end = starts[min(last, max(used[value], held)) + 1]
            blocks.append(Block(starts[at] + number, end, block.size_bytes))
    return tuple(block for block in blocks if block.size_bytes), starts[-1]


def same_size_pool(blocks: Iterable[Block]) -> int:
    """Bytes of a pool that splits no block: a freed one goes to the next of its rounded size alone."""
    by_size: defaultdict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        by_size[-(-block.size_bytes // ALLOCATION_UNIT_BYTES)].append(block)
    return sum(live_peak(tuple(alike)) for alike in by_size.values())


def workload(network: str, phase: str) -> Row:
    """In-core: bytes of a step or of a pass alone, without what is there before; in an arena, cached, and apart."""
    return packed_row(instance(network, LINKS[0]), network, phase)


def of_source(network: str, batch_size: int, phase: str) -> Row:
    """The same of a network of ``SOURCE`` or the Seq2Seq."""

    def made() -> Workload:
        found = source_network(network, batch_size)
        found.model.train(phase == PHASES[0])
        return found

    profile = profile_of(Instance(made, network), network, "v100")
    return packed_row(profile, network, phase) | {"batch_size": batch_size}


def source_network(network: str, batch_size: int) -> Workload:
    if network not in SOURCE:
        return fit.seq2seq(batch_size)
    model, side = SOURCE[network]
    return classifier(model(), (batch_size, 3, side, side), 1000)


def packed_row(profile: Profile, network: str, phase: str) -> Row:
    if phase == PHASES[0]:
        given = PolicyInput(Problem.of(profile), 0)
        step = blocks_of(given.problem, run_policy("keep-all", given).schedule)
        blocks, end = step.of_step, step.end
    else:
        blocks, end = forward_blocks(profile)
    packing = pack(blocks, LOOKS_PER_BLOCK * len(blocks))
    return {
        "network": network,
        "phase": phase,
        "blocks": len(blocks),
        "live_bytes": packing.lower_bound_bytes,
        "arena_bytes": packing.arena_bytes,
        "reserved_bytes": peak_reserved((), blocks, end).reserved_bytes,
        "same_size_bytes": same_size_pool(blocks),
        "apart_bytes": sum(block.size_bytes for block in blocks),
    }


def workload_table(rows: list[Row]) -> str:
    """How much less memory an arena takes than the allocator's model, a pool by sizes, and all blocks apart."""
    against = {"reserved_bytes": "cached", "same_size_bytes": "by size", "apart_bytes": "apart"}
    heads = ("network", "batch", "phase", "blocks", "live GiB", "arena", *against.values())
    heads += tuple(f"less than {name}" for name in against.values())
    lines = [table_head(*heads)]
    for row in rows:
        gib = [f"{row[name] / 2**30:.2f}" for name in ("live_bytes", "arena_bytes", *against)]
        less = [f"{1 - row['arena_bytes'] / row[name]:.1%}" for name in against]
        cells = (row["network"], row.get("batch_size", ""), row["phase"], f"{row['blocks']:,}")
        lines.append(table_row(*cells, *gib, *less))
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """The table of ``benchmarks/pages/arena.md``: percent above the live peak."""
    packed = ("packed", "s", "with plan", "s", "quick", "s")
    cached = ("all cached", "fetched apart", "fetched and replayed apart")
    lines = [table_head("network", "link", "kept", "blocks", "fetched / replayed", "live GiB", *packed, *cached)]
    for row in rows:
        live = row["live_bytes"]
        kept = "in-core" if row["kept"] == 1 else f"{row['kept']:.0%}"
        cells = [row["network"], row["link"], kept, f"{row['blocks']:,}", f"{row['fetched']} / {row['replayed']}"]
        for _, name, seconds in PACKED:
            cells += [f"{above_bound(row, name):.2%}", f"{row[seconds]:.2f}"]
        above = (row[name] / live - 1 for name in ("reserved_bytes", "fetched_apart_bytes", "own_apart_bytes"))
        lines.append(table_row(*cells[:5], f"{live / 2**30:.2f}", *cells[5:], *(f"{share:.1%}" for share in above)))
    return "\n".join(lines)


def above_bound(row: Row, what: str) -> float:
    """By how much an arena for the whole step is above the live peak, as a part of it."""
    return float(row[what] / row["step_live_bytes"] - 1)


def summary(rows: list[Row]) -> str:
    """How close packing comes to its bound; and in how many of the planned cases an arena of its own lowers what is
    reserved, and by how much.
    """
    lines = []
    plans = [row for row in rows if row["kept"] != 1]
    for name, what, seconds in PACKED:
        shares = [above_bound(row, what) for row in plans]
        lines.append(
            f"{name}: above the live peak {median(shares):.2%} in the median, {max(shares):.2%} at worst, nothing in "
            f"{shares.count(0)} of {len(shares)} plans; {median(row[seconds] for row in rows):.2f} s in the median, "
            f"{max(row[seconds] for row in rows):.2f} s at most"
        )
    lines.append(f"loading what is compiled, once in a process: {max(row['load_s'] for row in rows):.2f} s at most")
    for name, what in (("fetched_apart_bytes", "fetched"), ("own_apart_bytes", "fetched + replayed")):
        used = [r for r in rows if r["fetched"] + (r["replayed"] if name.startswith("own") else 0)]
        change = [(row[name] - row["reserved_bytes"]) / row["live_bytes"] for row in used]
        lower = sum(share < 0 for share in change)
        lines.append(
            f"an arena for {what}: lowers the bytes reserved in {lower} of {len(used)}, raises them in "
            f"{sum(share > 0 for share in change)}; median {median(change):+.1%} of the live peak, "
            f"from {min(change):+.1%} to {max(change):+.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(
        __doc__,
        networks=[*NETWORKS, "gpt-96"],
        links=(list(LINKS), "for all networks but gpt-96, which has pcie5"),
        source=(False, "the source's kind of networks alone, in-core"),
        jobs=2,
    )
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        if arguments.source:
            both = product((*SOURCE, "Seq2Seq"), SOURCE_BATCHES, PHASES)
            found = {"workloads": list(pool.map(of_source, *zip(*both, strict=True)))}
        else:
            found = of_plans(pool, arguments.networks, arguments.links)
            print(table(found["rows"]))
            print(summary(found["rows"]))
    print(workload_table(found["workloads"]))
    write_results(arguments.output, facts_of_run(arguments) | found)


def of_plans(pool: ProcessPoolExecutor, names: list[str], asked: list[str]) -> dict[str, list[Row]]:
    links = {network: ("pcie5",) if network == "gpt-96" else tuple(asked) for network in names}
    cases = [
        (network, link, kept)
        for network in names
        for link in links[network]
        for kept in (*((1.0,) if link == links[network][0] else ()), *KEPT)
    ]
    rows = []
    for row in pool.map(one, *zip(*cases, strict=True)):
        print(f"{row['network']} {row['link']} {row['kept']}", file=sys.stderr, flush=True)
        rows.append(row)
    return {"rows": rows, "workloads": list(pool.map(workload, *zip(*product(names, PHASES), strict=True)))}


if __name__ == "__main__":
    main()

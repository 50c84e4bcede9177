"""Policies that recompute: everything, everything between checkpoints, or everything cheap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import isqrt

import numpy as np

from poochplan.planner.simulator.simulate import Candidate

from .registry import PolicyInput, policy

SEGMENT_BUDGETS = 32
"""Number of segment budgets that ``checkpoint-greedy`` tries, from the bytes of the smallest value to those of all."""
_HEAVY = frozenset({"addmm", "mm", "bmm", "baddbmm", "matmul", "linear", "cat"})
_HEAVY_PARTS = ("conv", "softmax", "attention")
"""SuperNeurons does not recompute the results of ``_HEAVY`` operators, or of those with a part in their names."""


@policy("recompute-all")
def run_recompute_all(given: PolicyInput) -> Candidate:
    """Recomputes every value that can be recomputed and keeps the others. The link is not used."""
    return given.candidate(given.wish(recompute=sorted(given.replayable)))


@policy("sqrt-n")
def run_sqrt_n(given: PolicyInput) -> Candidate:
    """Keeps every k-th articulation point. The budget does not matter. (Chen et al., Training Deep Nets with Sublinear
    Memory Cost, 2016, section 4)

    An articulation point is an op with a saved result that every path of the forward graph passes. k is the integer
    part of the root of their number. Values that cannot be recomputed are kept. A segment is replayed as a whole, at
    its first use in backward.
    """
    points = _articulation_points(given)
    every = max(1, isqrt(len(points)))
    return _checkpointed(given, set(points[every - 1 :: every]))


@policy("checkpoint-greedy")
def run_checkpoint_greedy(given: PolicyInput) -> Candidate:
    """The best plan from a geometric grid of segment budgets (algorithm 3 of the same paper). Values that cannot be
    recomputed are kept.
    """
    total_bytes = int(given.problem.rounded_bytes.sum())
    smallest_bytes = int(given.problem.rounded_bytes.min())
    tried: dict[frozenset[int], Candidate] = {}
    for segment_bytes in np.geomspace(max(1, smallest_bytes), max(smallest_bytes + 1, total_bytes), SEGMENT_BUDGETS):
        checkpoints = frozenset(_greedy_checkpoints(given, float(segment_bytes)))
        if checkpoints not in tried:
            tried[checkpoints] = _checkpointed(given, checkpoints)
    return min(tried.values(), key=given.rank)


@policy("superneurons")
def run_superneurons(given: PolicyInput) -> Candidate:
    """Swaps checkpoints as far as memory is short. Recomputes the other values from the checkpoint before them (Wang et
    al., SuperNeurons, PPoPP 2018, sections 3.3 and 3.4).

    The paper recomputes a segment once and keeps it if it has at most ``l_peak`` bytes (those of the largest backward
    layer). It recomputes larger segments again for each of their layers. This runtime replays a value at most once. So
    every segment is recomputed once and kept, and long segments take more memory than in the paper. Values that cannot
    be recomputed are swapped. Attention is not in the paper, and counts as softmax. Joins and forks are those of ops.
    """
    sources = Counter(reader for _, reader in given.forward_edges)
    readers = Counter(source for source, _ in given.forward_edges)

    def is_checkpoint(value: int) -> bool:
        op = given.producers[value]
        kind = given.op_kinds[op]
        is_heavy = kind in _HEAVY or any(part in kind for part in _HEAVY_PARTS)
        return op < 0 or is_heavy or sources[op] > 1 or readers[op] > 1

    recompute = [value for value in sorted(given.replayable) if not is_checkpoint(value)]
    swapped = sorted(set(given.movable).difference(recompute))
    return given.candidate(given.wish(swap=swapped, recompute=recompute))


def _checkpointed(given: PolicyInput, checkpoints: Collection[int]) -> Candidate:
    """The plan that keeps the results of these ops, and recomputes all other values that can be recomputed."""
    recompute = [value for value in sorted(given.replayable) if given.producers[value] not in checkpoints]
    return given.candidate(given.wish(recompute=recompute))


def _greedy_checkpoints(given: PolicyInput, segment_bytes: float) -> list[int]:
    """Articulation points at which the saved bytes since the last checkpoint exceed ``segment_bytes``."""
    bytes_of_op: dict[int, int] = {}
    for value, producer in enumerate(given.producers):
        bytes_of_op[producer] = bytes_of_op.get(producer, 0) + int(given.problem.rounded_bytes[value])
    points = set(_articulation_points(given))
    checkpoints = []
    held_bytes = 0
    for op in sorted(bytes_of_op):
        held_bytes += bytes_of_op[op]
        if op in points and held_bytes > segment_bytes:
            checkpoints.append(op)
            held_bytes = 0
    return checkpoints


def _articulation_points(given: PolicyInput) -> list[int]:
    """Ops with a saved result that every path of the forward graph passes, in order.

    These are the ops for which no edge leads from an earlier op to a later one. The graph leaves out ops that gradients
    do not flow through, such as those of an attention mask.
    """
    inner = {source for source, _ in given.forward_edges} & {reader for _, reader in given.forward_edges}
    around = np.zeros(len(given.profile.ops) + 1, dtype=np.int64)
    for source, reader in given.forward_edges:
        around[source + 1] += 1
        around[reader] -= 1
    edges_around = np.cumsum(around)
    return sorted(op for op in inner.intersection(given.producers) if edges_around[op] == 0)

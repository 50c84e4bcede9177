"""Policies that recompute: everything, between checkpoints, or all that is cheap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import isqrt

import numpy as np

from poochplan.planner.simulator.simulate import Candidate

from .registry import PolicyInput, policy

SEGMENT_BUDGETS = 32
"""How many segment budgets ``checkpoint-greedy`` tries, from the smallest value to all of them together."""
_HEAVY = frozenset({"addmm", "mm", "bmm", "baddbmm", "matmul", "linear", "cat"})
_HEAVY_PARTS = ("conv", "softmax", "attention")
"""Operators, and parts of their names, whose results SuperNeurons does not recompute."""


@policy("recompute-all", "recomputes everything that can be, from the inputs of the step")
def run_recompute_all(given: PolicyInput) -> Candidate:
    """Everything that cannot be recomputed is kept, and nothing is moved over the link."""
    return given.candidate(given.wish(recompute=sorted(given.replayable)))


@policy(
    "sqrt-n",
    "keeps every k-th articulation point of the forward graph, k the root of their number; recomputes the rest",
    "Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, section 4",
)
def run_sqrt_n(given: PolicyInput) -> Candidate:
    """Checkpoints at articulation points, whatever the budget is.

    An articulation point is an op with a saved result that every path of the forward graph passes; k is the integer
    part of the root of their number. What cannot be recomputed is kept. A segment is replayed at once, at its first
    use in backward.
    """
    points = _articulation_points(given)
    every = max(1, isqrt(len(points)))
    return _checkpointed(given, set(points[every - 1 :: every]))


@policy(
    "checkpoint-greedy",
    "keeps an articulation point whenever the bytes since the last one exceed a segment budget, which is searched",
    "Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, algorithm 3",
)
def run_checkpoint_greedy(given: PolicyInput) -> Candidate:
    """The best of the plans for a geometric grid of segment budgets; what cannot be recomputed is kept."""
    total_bytes = int(given.problem.rounded_bytes.sum())
    smallest_bytes = int(given.problem.rounded_bytes.min())
    tried: dict[frozenset[int], Candidate] = {}
    for segment_bytes in np.geomspace(max(1, smallest_bytes), max(smallest_bytes + 1, total_bytes), SEGMENT_BUDGETS):
        checkpoints = frozenset(_greedy_checkpoints(given, float(segment_bytes)))
        if checkpoints not in tried:
            tried[checkpoints] = _checkpointed(given, checkpoints)
    return min(tried.values(), key=given.rank)


@policy(
    "superneurons",
    "swaps results of convolution, linear, attention, softmax, join, fork and concat; recomputes the rest, once each",
    "Wang et al., SuperNeurons, PPoPP 2018, sections 3.3 and 3.4",
)
def run_superneurons(given: PolicyInput) -> Candidate:
    """Checkpoints are swapped when memory asks for them; everything else is recomputed from the checkpoint before it.

    The paper recomputes a segment once and keeps it where it is at most ``l_peak`` (the bytes of the largest backward
    layer), and else again for each of its layers. This runtime replays a value at most once, so every segment is
    recomputed once and kept, and long segments take more memory than in the paper. What cannot be recomputed is
    swapped. Attention, which the paper does not know, counts as softmax; joins and forks are those of ops.
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
    """The results of these ops kept, everything else recomputed that can be."""
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
    """Ops with a saved result that no edge of the forward graph goes around, in order.

    In execution order, an op lies on all paths exactly when no edge leads from before it to after it. Ops that
    gradients do not flow through, such as those of an attention mask, are not part of the graph.
    """
    inner = {source for source, _ in given.forward_edges} & {reader for _, reader in given.forward_edges}
    around = np.zeros(len(given.profile.ops) + 1, dtype=np.int64)
    for source, reader in given.forward_edges:
        around[source + 1] += 1
        around[reader] -= 1
    edges_around = np.cumsum(around)
    return sorted(op for op in inner.intersection(given.producers) if edges_around[op] == 0)

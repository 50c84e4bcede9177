"""The layout of a planned step: the blocks of device memory that it takes, and their places in one arena.

Times are finer than ticks. An op's tick has a time for each block that it takes. A use point with replays has the times
of the ops that they run, and one more. If an op's blocks are unknown, the most bytes live at the times of its tick
equal the simulator's bytes at that tick. If they are known, they are at most that, inside replays too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from poochplan.formats.occupancy import born_ticks
from poochplan.formats.plan import OUTSIDE, Decision, Layout, Place
from poochplan.formats.profile import Kind, Op, OpBlock, Profile
from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from poochplan.planner.arena.packing import LOOKS_PER_BLOCK, Block, live_peak, pack
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule
from poochplan.planner.simulator.simulate import ReplayRun, Walk, lives


@dataclass(frozen=True)
class StepBlocks:
    """All device blocks of one planned step, by their origin; sizes are as requested, not rounded."""

    before: tuple[Block, ...]
    """Memory from before the step: parameters, optimizer state, inputs."""
    by_ops: tuple[Block, ...]
    """Results of ops, memory that ops take and give back inside, and temporaries of replays."""
    gradients: tuple[Block, ...]
    """Results of ops that are gradients of parameters."""
    fetched: tuple[Block, ...]
    """Buffers for values that come back from the host."""
    replayed: tuple[Block, ...]
    """Values that come back by replay."""
    end: int
    """Time at which the step is over."""
    point_times: tuple[int, ...]
    """Time of each point of the runtime's clock."""

    @cached_property
    def of_step(self) -> tuple[Block, ...]:
        """All blocks that the step itself takes, in the order of being taken."""
        every = self.fetched + self.by_ops + self.gradients + self.replayed
        return tuple(sorted(every, key=lambda block: block.start))

    def points_before(self, block: Block) -> int:
        """Number of points that have been passed when the block is taken."""
        return bisect_right(self.point_times, block.start)


def blocks_of(profile: Profile, problem: Problem, schedule: Schedule) -> StepBlocks:
    """The blocks of a step under ``schedule``; empty ones are left out."""
    walk = Walk(problem, schedule)
    taken = [taken_by(profile, op) for op in profile.ops]
    clock = _clock(profile, problem, walk, taken)
    first_end, back, end = (ticks.tolist() for ticks in lives(problem, walk))
    value_of = problem.replay.value_of
    last_tick = [min(value.freed, problem.tick_count - 1) for value in profile.values]
    for saved, value in enumerate(value_of):
        last_tick[value] = first_end[saved]
    ends = {value: clock[tick + 1] for value, tick in enumerate(last_tick)}
    in_step = {v for v, record in enumerate(profile.values) if record.born >= 0 or record.born_tick is not None}
    before = [Block(0, ends[v], record.size_bytes) for v, record in enumerate(profile.values) if v not in in_step]
    by_ops, gradients = list[Block](), list[Block]()
    for op, tick, own in zip(profile.ops, profile.op_ticks, taken, strict=True):
        for value, block in _at(own, op.outputs, clock[tick], ends, clock[-1]):
            is_gradient = value >= 0 and profile.values[value].kind is Kind.GRADIENT
            (gradients if is_gradient else by_ops).append(block)
    born = born_ticks(profile, range(len(profile.values))).tolist()
    by_ops += [
        Block(clock[born[v]], ends[v], profile.values[v].size_bytes)
        for v in sorted(in_step - {value for op in profile.ops for value in op.outputs})  # taken between ops
    ]
    again = {value_of[saved]: clock[end[saved] + 1] for saved in range(len(back)) if back[saved] >= 0}
    replayed: list[Block] = []
    now = {run.tick: clock[run.tick] for run in walk.replays}
    for run in walk.replays:
        inside = _ReplayBlocks(profile, problem, run, taken)
        for value, block in inside.blocks(now[run.tick], again):
            (replayed if value in inside.targets else by_ops).append(block)
        now[run.tick] += inside.width
    size_bytes = [profile.values[value].size_bytes for value in value_of]
    fetched = [Block(clock[back[s]], clock[end[s] + 1], size_bytes[s]) for s in walk.copied_in]
    point_times = tuple(clock[tick] for tick in profile.point_ticks)
    return StepBlocks(
        before=_taken(before),
        by_ops=_taken(by_ops),
        gradients=_taken(gradients),
        fetched=_taken(fetched),
        replayed=_taken(replayed),
        end=clock[-1],
        point_times=point_times,
    )


def taken_by(profile: Profile, op: Op) -> tuple[OpBlock, ...]:
    """The blocks that an op takes. If they are unknown: its workspace, and its outputs at the same time."""
    if op.blocks:
        return op.blocks
    outputs = tuple(OpBlock(profile.values[value].size_bytes, at, -1) for at, value in enumerate(op.outputs))
    if not op.workspace_bytes:
        return outputs
    return (OpBlock(op.workspace_bytes, -1, 1 + len(outputs)), *outputs)


def _at(
    own: Sequence[OpBlock], outputs: Sequence[int], start: int, ends: Mapping[int, int], last: int
) -> Iterator[tuple[int, Block]]:
    """The blocks of an op that begins at ``start``, with the value in each, or -1. ``ends`` are by value. A block that
    the op leaves and that is no output lives until ``last``.
    """
    for at, block in enumerate(own):
        value = outputs[block.output] if block.output >= 0 else -1
        end = start + block.until if block.until >= 0 else ends.get(value, last)
        yield value, Block(start + at, end, block.size_bytes)


def _taken(blocks: list[Block]) -> tuple[Block, ...]:
    """Blocks in the order of being taken."""
    return tuple(sorted((block for block in blocks if block.size_bytes), key=lambda block: block.start))


def _clock(profile: Profile, problem: Problem, walk: Walk, taken: Sequence[Sequence[OpBlock]]) -> list[int]:
    """The first time of each tick, and the time after the last."""
    times = [1] * problem.tick_count
    for tick, own in zip(profile.op_ticks, taken, strict=True):
        times[tick] = max(1, len(own))
    for run in walk.replays:
        times[run.tick] += _ReplayBlocks(profile, problem, run, taken).width
    return [0, *accumulate(times)]


class _ReplayBlocks:
    """The blocks of a replay. ``targets`` are values of the profile; ``width`` is the number of its times."""

    def __init__(self, profile: Profile, problem: Problem, run: ReplayRun, taken: Sequence[Sequence[OpBlock]]) -> None:
        self._profile, self._graph, self._taken = profile, problem.replay, taken
        self.targets = {self._graph.value_of[target] for target in run.targets}
        self._ops = self._graph.merged(run.targets).ops
        self._starts = [0, *accumulate(max(1, len(taken[op])) for op in self._ops)]
        self.width = self._starts[-1]

    def blocks(self, start: int, again: Mapping[int, int]) -> Iterator[tuple[int, Block]]:
        """Blocks of a replay that begins at ``start``, with the value in each, or -1; ``again`` are the targets'
        ends.
        """
        lives = self._graph.lives(self._ops, self.targets)
        ends = {value: start + self._starts[last + 1] for value, _, last in lives}
        ends |= {target: again[target] for target in self.targets}
        for op, begin, end in zip(self._ops, self._starts, self._starts[1:], strict=False):
            record = self._profile.ops[op]
            yield from _at(self._taken[op], record.outputs, start + begin, ends, start + end)
            stand_ins_bytes = self._graph.op_workspace_bytes[op] - self._profile.rounded_bytes(record.workspace_bytes)
            yield -1, Block(start + begin, start + end, stand_ins_bytes)


MOST_BLOCKS = 20_000
"""With more blocks, no arena is computed along with a plan: that would take longer than a few seconds."""
GENERATOR_STATE_BYTES = 5120
"""Recording a random op reads the generator's state, and so does its replay. The state lies outside the arena for a
moment."""


@dataclass(frozen=True)
class Laid:
    """A layout, and the bytes that it takes."""

    layout: Layout
    live_bytes: int
    """Most bytes of the arena's blocks that are live at any moment: no arena is smaller."""
    peak_bytes: int
    """The arena, and the most bytes that lie outside it at any moment, including memory from before the step."""


def layout_of(
    profile: Profile, problem: Problem, schedule: Schedule, *, enough_bytes: int = 0, room: float = 0.0
) -> Laid | None:
    """The layout of the blocks of a step under ``schedule``; None if there are more than ``MOST_BLOCKS``.

    Packing ends early once the arena, with ``room`` as a share of it and the memory outside it, is at most
    ``enough_bytes``.

    Outside lie blocks of less than ``LEAST_PLACED_BYTES``, blocks from before the first point of the clock, where a
    step cannot be recognised yet, and blocks that outlive the step. Gradients that are gone by the next forward lie
    inside.
    """
    blocks = blocks_of(profile, problem, schedule)
    if len(blocks.of_step) > MOST_BLOCKS:
        return None
    gone = set() if profile.gradients_live_through_forward else set(blocks.gradients)
    large = [
        block for block in blocks.of_step if block.size_bytes >= LEAST_PLACED_BYTES and blocks.points_before(block) > 0
    ]
    inside = [block for block in large if block.end < blocks.end or block in gone]
    is_inside = set(inside)
    outside = [block for block in blocks.of_step if block not in is_inside]
    outside_bytes = live_peak([one for one in (*blocks.before, *outside) if profile.rounded_bytes(one.size_bytes)])
    if Decision.RECOMPUTE in schedule.decisions:
        outside_bytes += GENERATOR_STATE_BYTES
    enough = max(0, int((enough_bytes - outside_bytes) / (1 + room)))
    packing = pack(inside, LOOKS_PER_BLOCK * len(inside), enough)
    offsets = iter(packing.offsets)
    places = tuple(
        Place(blocks.points_before(block), block.size_bytes, next(offsets) if block in is_inside else OUTSIDE)
        for block in large
    )
    layout = Layout(arena_bytes=packing.arena_bytes, least_bytes=LEAST_PLACED_BYTES, places=places)
    return Laid(layout, packing.lower_bound_bytes, packing.arena_bytes + outside_bytes)

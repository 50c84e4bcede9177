"""The blocks of device memory that a planned step takes: what an arena holds, what an allocator is asked for.

Times are finer than ticks: an op's tick has a time for each block that it takes, and a use point at which replays run
has those of the ops they run, and one more. Where nothing is known of an op's blocks, the most bytes that are live at
the times of its tick are the simulator's bytes at that tick; where they are known they are no more, inside replays too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from poochplan.formats.occupancy import born_ticks
from poochplan.formats.profile import Kind, Op, OpBlock, Profile
from poochplan.planner.judge.simulate import ReplayRun, Walk, lives
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import Schedule

from .packing import Block


@dataclass(frozen=True)
class StepBlocks:
    """All device blocks of one planned step, by who takes them; sizes are those asked for, not rounded."""

    before: tuple[Block, ...]
    """What is there before the step: parameters, optimizer state, inputs."""
    by_ops: tuple[Block, ...]
    """Results of ops, what they take and give back inside, and temporaries of replays."""
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
        """All that the step takes itself, in the order in which it does."""
        every = self.fetched + self.by_ops + self.gradients + self.replayed
        return tuple(sorted(every, key=lambda block: block.start))

    def points_before(self, block: Block) -> int:
        """How many points have been passed when the block is taken."""
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
        inside = _Inside(profile, problem, run, taken)
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
    """What an op takes of the allocator. Where that is not known: its workspace, and meanwhile its outputs."""
    if op.blocks:
        return op.blocks
    outputs = tuple(OpBlock(profile.values[value].size_bytes, at, -1) for at, value in enumerate(op.outputs))
    if not op.workspace_bytes:
        return outputs
    return (OpBlock(op.workspace_bytes, -1, 1 + len(outputs)), *outputs)


def _at(
    own: Sequence[OpBlock], outputs: Sequence[int], start: int, ends: Mapping[int, int], last: int
) -> Iterator[tuple[int, Block]]:
    """The blocks of an op that begins at ``start``, with the value in each, or -1. ``ends`` are by value; what an op
    leaves behind and is none of its outputs lives to ``last``.
    """
    for at, block in enumerate(own):
        value = outputs[block.output] if block.output >= 0 else -1
        end = start + block.until if block.until >= 0 else ends.get(value, last)
        yield value, Block(start + at, end, block.size_bytes)


def _taken(blocks: list[Block]) -> tuple[Block, ...]:
    """In the order in which they are taken."""
    return tuple(sorted((block for block in blocks if block.size_bytes), key=lambda block: block.start))


def _clock(profile: Profile, problem: Problem, walk: Walk, taken: Sequence[Sequence[OpBlock]]) -> list[int]:
    """The first time of each tick, and the time after the last."""
    times = [1] * problem.tick_count
    for tick, own in zip(profile.op_ticks, taken, strict=True):
        times[tick] = max(1, len(own))
    for run in walk.replays:
        times[run.tick] += _Inside(profile, problem, run, taken).width
    return [0, *accumulate(times)]


class _Inside:
    """What a replay takes. ``targets`` are values of the profile; ``width`` is how many times it has."""

    def __init__(self, profile: Profile, problem: Problem, run: ReplayRun, taken: Sequence[Sequence[OpBlock]]) -> None:
        self._profile, self._graph, self._taken = profile, problem.replay, taken
        self.targets = {self._graph.value_of[target] for target in run.targets}
        self._ops = self._graph.merged(run.targets).ops
        self._starts = [0, *accumulate(max(1, len(taken[op])) for op in self._ops)]
        self.width = self._starts[-1]

    def blocks(self, start: int, again: Mapping[int, int]) -> Iterator[tuple[int, Block]]:
        """Of a replay that begins at ``start``, with the value in each, or -1; ``again`` are the targets' ends."""
        lives = self._graph.lives(self._ops, self.targets)
        ends = {value: start + self._starts[last + 1] for value, _, last in lives}
        ends |= {target: again[target] for target in self.targets}
        for op, begin, end in zip(self._ops, self._starts, self._starts[1:], strict=False):
            record = self._profile.ops[op]
            yield from _at(self._taken[op], record.outputs, start + begin, ends, start + end)
            stand_ins_bytes = self._graph.op_workspace_bytes[op] - self._profile.rounded_bytes(record.workspace_bytes)
            yield -1, Block(start + begin, start + end, stand_ins_bytes)

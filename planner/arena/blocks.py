"""The blocks of device memory that a planned step takes: what an arena would hold, what an allocator is asked for.

Times are finer than ticks: a use point at which replays run has a time for each op they run, and one more. So the most
bytes that are live at the times of a tick are the simulator's bytes at that tick, inside replays too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from poochplan.formats.profile import Profile
from poochplan.planner.judge.simulate import ReplayRun, Walk, lives
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import Schedule

from .packing import Block, Packing, pack

MOST_BLOCKS = 20_000
"""With more than these an arena is not worked out along with a plan: that would take longer than a few seconds."""
LOOKS_PER_BLOCK = 100_000
"""What packing along with a plan may take, in the looks of ``pack``: a second or two for some thousands of blocks."""


@dataclass(frozen=True)
class StepBlocks:
    """All device blocks of one planned step, by who takes them."""

    before: tuple[Block, ...]
    """What is there before the step: parameters, optimizer state, inputs."""
    by_ops: tuple[Block, ...]
    """Results of ops, their workspace, and temporaries of replays."""
    fetched: tuple[Block, ...]
    """Buffers for values that come back from the host."""
    replayed: tuple[Block, ...]
    """Values that come back by replay."""
    end: int
    """Time at which the step is over."""

    @property
    def of_step(self) -> tuple[Block, ...]:
        """All that the step takes itself."""
        return self.fetched + self.by_ops + self.replayed


def arena_of(profile: Profile, problem: Problem, schedule: Schedule) -> Packing | None:
    """One static arena for all that the step takes itself; None when there are more than ``MOST_BLOCKS`` blocks."""
    blocks = blocks_of(profile, problem, schedule).of_step
    return pack(blocks, LOOKS_PER_BLOCK * len(blocks)) if len(blocks) <= MOST_BLOCKS else None


def blocks_of(profile: Profile, problem: Problem, schedule: Schedule) -> StepBlocks:
    """The blocks of a step under ``schedule``; empty ones are left out."""
    walk = Walk(problem, schedule)
    clock = _clock(problem, walk)
    first_end, back, end = (ticks.tolist() for ticks in lives(problem, walk))
    value_of, size_bytes = problem.replay.value_of, problem.replay.value_bytes
    last_tick = [min(value.freed, problem.tick_count - 1) for value in profile.values]
    for saved, value in enumerate(value_of):
        last_tick[value] = first_end[saved]
    before: list[Block] = []
    by_ops: list[Block] = []
    for value, record in enumerate(profile.values):
        born = profile.op_ticks[record.born] if record.born >= 0 else 0
        block = Block(clock[born], clock[last_tick[value] + 1], size_bytes[value])
        (by_ops if record.born >= 0 else before).append(block)
    for op, tick in zip(profile.ops, profile.op_ticks, strict=True):
        by_ops.append(Block(clock[tick], clock[tick + 1], profile.rounded_bytes(op.workspace_bytes)))
    again = {value_of[saved]: clock[end[saved] + 1] for saved in range(len(back)) if back[saved] >= 0}
    replayed = []
    now = {run.tick: clock[run.tick] for run in walk.replays}
    for run in walk.replays:
        targets = {value_of[target] for target in run.targets}
        for value, block in _inside(problem, run, targets, now[run.tick]):
            if value in targets:
                replayed.append(block._replace(end=again[value]))
            else:
                by_ops.append(block)
        now[run.tick] += len(problem.replay.merged(run.targets).ops)
    fetched = [Block(clock[back[s]], clock[end[s] + 1], size_bytes[value_of[s]]) for s in walk.copied_in]
    return StepBlocks(_taken(before), _taken(by_ops), _taken(fetched), _taken(replayed), clock[-1])


def _taken(blocks: list[Block]) -> tuple[Block, ...]:
    """In the order in which they are taken."""
    return tuple(sorted((block for block in blocks if block.size_bytes), key=lambda block: block.start))


def _clock(problem: Problem, walk: Walk) -> list[int]:
    """The first time of each tick, and the time after the last."""
    times = [1] * problem.tick_count
    for run in walk.replays:
        times[run.tick] += len(problem.replay.merged(run.targets).ops)
    return [0, *accumulate(times)]


def _inside(problem: Problem, run: ReplayRun, targets: set[int], start: int) -> Iterator[tuple[int, Block]]:
    """What a replay that begins at ``start`` takes, with the value; -1 for workspace."""
    graph = problem.replay
    ops = graph.merged(run.targets).ops
    for value, born, last in graph.lives(ops, targets):
        yield value, Block(start + born, start + last + 1, graph.value_bytes[value])
    for position, op in enumerate(ops):
        yield -1, Block(start + position, start + position + 1, graph.op_workspace_bytes[op])

"""The layout of a planned step: the blocks of device memory that it takes, and their places in one arena; and plans for
which the arena and the memory outside it are within the budget, and not only the live bytes.

Times are finer than ticks. An op's tick has a time for each block that it takes. A use point with replays has the times
of the ops that they run, and one more. If an op's blocks are unknown, the most bytes live at the times of its tick
equal the simulator's bytes at that tick. If they are known, they are at most that, inside replays too.
"""

from __future__ import annotations

import threading
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
from poochplan.planner.simulator.replays import MergedReplay
from poochplan.planner.simulator.schedule import Schedule, keep_all
from poochplan.planner.simulator.simulate import Candidate, Walk, swap_all_on_demand


@dataclass(frozen=True)
class StepBlocks:
    """All device blocks of one planned step, by their origin; sizes are as requested, not rounded."""

    before: tuple[Block, ...]
    """Memory from before the step: parameters, optimizer state, inputs."""
    by_ops: tuple[Block, ...]
    """Results of ops, memory that ops take and give back inside, and temporaries of replays."""
    fetched: tuple[Block, ...]
    """Buffers for values that come back from the host."""
    replayed: tuple[Block, ...]
    """Values that come back by replay."""
    gone_by_next: frozenset[Block]
    """Those that live to the end of the step, and are gone when the next one begins. Gradients are, unless the loop
    keeps them through forward."""
    end: int
    """Time at which the step is over."""
    point_times: tuple[int, ...]
    """Time of each point of the runtime's clock."""
    op_times: tuple[int, ...]
    """The last time of each op."""
    replay_times: tuple[tuple[int, int], ...]
    """The last time of each op that is run again, and the op."""

    @cached_property
    def of_step(self) -> tuple[Block, ...]:
        """All blocks that the step itself takes, in the order of being taken."""
        every = self.fetched + self.by_ops + self.replayed
        return tuple(sorted(every, key=lambda block: block.start))

    def points_before(self, block: Block) -> int:
        """Number of points that have been passed when the block is taken."""
        return bisect_right(self.point_times, block.start)


def blocks_of(problem: Problem, schedule: Schedule, *, sums_in_place: bool = False) -> StepBlocks:
    """The blocks of a step under ``schedule``; empty ones are left out. ``sums_in_place``: autograd's sums of gradients
    take none, which is so in a step without a dispatch mode.
    """
    profile, walk = problem.profile, Walk(problem, schedule)
    taken = [taken_by(profile, op) for op in profile.ops]
    clock = _clock(problem, walk, taken)
    first_end, back, end = (ticks.tolist() for ticks in walk.lives)
    value_of = problem.replay.value_of
    last_tick = [min(value.freed, problem.tick_count - 1) for value in profile.values]
    for saved, value in enumerate(value_of):
        last_tick[value] = first_end[saved]
    sums = {op.outputs[0]: op.inputs[0] for op in profile.ops if op.adds_in_place and sums_in_place}
    becomes = dict[int, int]()
    for value, first in reversed(sums.items()):  # the last sum of several first
        becomes[first], last_tick[first] = becomes.get(value, value), last_tick[value]
    ends = {value: clock[tick + 1] for value, tick in enumerate(last_tick)}
    in_step = {v for v, record in enumerate(profile.values) if record.born >= 0 or record.born_tick is not None}
    before = [Block(0, ends[v], record.size_bytes) for v, record in enumerate(profile.values) if v not in in_step]
    by_ops, gone_by_next = list[Block](), set[Block]()
    are_gradients_gone = not profile.gradients_live_through_forward
    for op, tick, own in zip(profile.ops, profile.op_ticks, taken, strict=True):
        for value, block in _at(own, op.outputs, clock[tick], ends, clock[-1]):
            if value in sums:
                continue
            by_ops.append(block)
            record = profile.values[becomes.get(value, value)] if value >= 0 and block.end == clock[-1] else None
            if record and (record.gone_by_next or (are_gradients_gone and record.kind is Kind.GRADIENT)):
                gone_by_next.add(block)
    born = born_ticks(profile, range(len(profile.values))).tolist()
    by_ops += [
        Block(clock[born[v]], ends[v], profile.values[v].size_bytes)
        for v in sorted(in_step - {value for op in profile.ops for value in op.outputs})  # taken between ops
    ]
    again = {value_of[saved]: clock[end[saved] + 1] for saved in range(len(back)) if back[saved] >= 0}
    replayed, replay_times = list[Block](), list[tuple[int, int]]()
    now = {tick: clock[tick] for tick, _ in walk.replays}
    for tick, replay in walk.replays:
        targets = {value_of[target] for target in replay.targets}
        for value, block in _blocks_of_replay(problem, replay, taken, now[tick], again):
            (replayed if value in targets else by_ops).append(block)
        times = _replay_times(replay, taken)
        replay_times += [(now[tick] + time - 1, op) for op, time in zip(replay.ops, times[1:], strict=True)]
        now[tick] += times[-1]
    size_bytes = problem.size_bytes.tolist()
    fetched = [Block(clock[back[s]], clock[end[s] + 1], size_bytes[s]) for s in walk.copied_in]
    point_times = tuple(clock[tick] for tick in profile.point_ticks)
    return StepBlocks(
        before=_taken(before),
        by_ops=_taken(by_ops),
        fetched=_taken(fetched),
        replayed=_taken(replayed),
        gone_by_next=frozenset(gone_by_next),
        end=clock[-1],
        point_times=point_times,
        op_times=tuple(clock[tick + 1] - 1 for tick in profile.op_ticks),
        replay_times=tuple(replay_times),
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


def _clock(problem: Problem, walk: Walk, taken: Sequence[Sequence[OpBlock]]) -> list[int]:
    """The first time of each tick, and the time after the last."""
    times = [1] * problem.tick_count
    for tick, own in zip(problem.profile.op_ticks, taken, strict=True):
        times[tick] = max(1, len(own))
    for tick, replay in walk.replays:
        times[tick] += _replay_times(replay, taken)[-1]
    return [0, *accumulate(times)]


def _replay_times(replay: MergedReplay, taken: Sequence[Sequence[OpBlock]]) -> list[int]:
    """The first time of each op of a replay, and the time after the last, from its beginning."""
    return [0, *accumulate(max(1, len(taken[op])) for op in replay.ops)]


def _blocks_of_replay(
    problem: Problem,
    replay: MergedReplay,
    taken: Sequence[Sequence[OpBlock]],
    start: int,
    again: Mapping[int, int],
) -> Iterator[tuple[int, Block]]:
    """Blocks of a replay that begins at ``start``, with the value in each, or -1; ``again`` are the targets' ends."""
    profile, graph, times = problem.profile, problem.replay, [start + time for time in _replay_times(replay, taken)]
    targets = {graph.value_of[target] for target in replay.targets}
    ends = {value: times[last + 1] for value, _, last in graph.lives(replay.ops, targets)}
    ends |= {target: again[target] for target in targets}
    for op, begin, end in zip(replay.ops, times, times[1:], strict=False):
        record = profile.ops[op]
        yield from _at(taken[op], record.outputs, begin, ends, end)
        yield -1, Block(begin, end, graph.op_workspace_bytes[op] - profile.rounded_bytes(record.workspace_bytes))


MOST_BLOCKS = 20_000
"""With more blocks, no arena is computed along with a plan: that would take longer than a few seconds."""
GENERATOR_STATE_BYTES = 5120
"""Recording or replaying a random op reads the generator's state, which lies outside the arena for a moment."""


@dataclass(frozen=True)
class Laid:
    """A layout, and the bytes that it takes."""

    layout: Layout
    live_bytes: int
    """Most bytes of the arena's blocks that are live at any moment: no arena is smaller."""
    peak_bytes: int
    """The arena, and the most bytes that lie outside it at any moment, including memory from before the step."""


def layout_of(problem: Problem, schedule: Schedule, *, enough_bytes: int = 0, room: float = 0.0) -> Laid | None:
    """The layout of the blocks of a step under ``schedule``; None if there are more than ``MOST_BLOCKS``.

    Packing ends early once the arena, with ``room`` as a share of it and the memory outside it, is at most
    ``enough_bytes``.

    Outside lie blocks of less than ``LEAST_PLACED_BYTES``, blocks from before the first point of the clock, where a
    step cannot be recognised yet, and blocks that are still there when the next step begins.
    """
    blocks = blocks_of(problem, schedule)
    if len(blocks.of_step) > MOST_BLOCKS:
        return None
    large = [
        block for block in blocks.of_step if block.size_bytes >= LEAST_PLACED_BYTES and blocks.points_before(block) > 0
    ]
    inside = [block for block in large if block.end < blocks.end or block in blocks.gone_by_next]
    is_inside = set(inside)
    outside = [block for block in blocks.of_step if block not in is_inside]
    outside_bytes = live_peak(
        [one for one in (*blocks.before, *outside) if problem.profile.rounded_bytes(one.size_bytes)]
    )
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


ROOM = 0.005
"""Share of the arena that should remain free in the budget. A real step's blocks are laid out again, and differ a
little. In 18 plans of six networks, a search of at most 0.2 s found an arena that exceeded the planned one by at most
this share."""
DEAREST = 0.02
"""A plan with room may have a step that is longer by this share."""
CLIMB = 0.0025
"""Share of the budget by which the next plans may have more live bytes once one fits."""
HOPELESS = 8
"""After this many plans with the fewest live bytes whose arena does not fit, no room is requested; after as many again,
no arena."""
NO_ARENA = "no plan was found whose arena fits the budget too: its steps are served by the ordinary allocator"
NO_ROOM = "its arena fits the budget with less than 0.5% of room: a step that takes other blocks may need more"


@dataclass(frozen=True, eq=False)
class Packed:
    """A plan whose arena fits the budget."""

    candidate: Candidate
    laid: Laid | None
    """None if it has too many blocks to be laid out."""
    note: str = ""

    @property
    def step_s(self) -> float:
        return self.candidate.simulation.step_s


class Fitting:
    """State: the best packed plans, and what the last one shows about the next. Any thread may use it.

    Walks know live bytes alone. A plan that would become the best one is packed before it is accepted. The bytes that
    packing added are subtracted from the live bytes that the next plans may have. The arena should leave room in the
    budget, because the runtime lays out a real step (``ROOM``). The room is a preference; the budget is a limit.
    """

    unfit, no_room = NO_ARENA, NO_ROOM
    """Notes of a plan if none fits, or none with room."""
    dearest = DEAREST
    climb = 0.0
    """Share of the budget's rest by which the next plans may have more live bytes once one fits."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        self._problem, self._budget_bytes = problem, budget_bytes
        self._least_bytes = swap_all_on_demand(problem).peak_bytes
        self.within_bytes = max(self._least_bytes, int(budget_bytes / (1 + ROOM)))
        """Live bytes with which an arena is expected to fit."""
        self._lock = threading.Lock()
        self._shortest: dict[str, Packed] = {}
        """By note: the shortest plan whose arena leaves room, and the shortest whose arena does not."""
        self._failed = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether apparently no arena fits."""
        return self._failed >= 2 * HOPELESS and not self._shortest

    def pack(self, candidate: Candidate) -> int:
        """Bytes of a budget that holds the plan's arena, the memory outside it, and room. Remembers a fitting plan."""
        taken_bytes, room_bytes, laid = self._taken(candidate)
        with_room_bytes = taken_bytes + room_bytes
        packed = Packed(candidate, laid, "" if with_room_bytes <= self._budget_bytes else self.no_room)
        with self._lock:
            shortest = self._shortest.get(packed.note)
            if taken_bytes <= self._budget_bytes and (shortest is None or packed.step_s < shortest.step_s):
                self._shortest[packed.note] = packed
            needed_bytes = with_room_bytes if self._failed < HOPELESS else taken_bytes
            if needed_bytes <= self._budget_bytes:
                more_bytes = max(int(CLIMB * self._budget_bytes), int(self.climb * (self._budget_bytes - needed_bytes)))
                most_bytes = candidate.peak_bytes + more_bytes
                self.within_bytes = min(self._budget_bytes, max(self.within_bytes, most_bytes))
            else:
                self._failed += self.within_bytes == self._least_bytes
                fewer_bytes = candidate.peak_bytes - (needed_bytes - self._budget_bytes)
                self.within_bytes = max(self._least_bytes, min(self.within_bytes, fewer_bytes))
        return needed_bytes

    def _taken(self, candidate: Candidate) -> tuple[int, int, Laid | None]:
        """Bytes that the plan takes, and those that should remain free."""
        laid = layout_of(self._problem, candidate.schedule, enough_bytes=self._budget_bytes, room=ROOM)
        if laid is None:
            return candidate.peak_bytes, 0, None
        return laid.peak_bytes, int(ROOM * laid.layout.arena_bytes), laid

    def chosen(self) -> Packed | None:
        """The shortest step of plans whose arena leaves room; if there is none, or it is too slow, of the others."""
        best, tight = self._shortest.get(""), self._shortest.get(self.no_room)
        if best is None or tight is None:
            return best or tight
        return tight if best.step_s > (1 + self.dearest) * tight.step_s else best


def smallest_arena(problem: Problem) -> int:
    """Bytes of a budget that certainly has a plan whose arena fits, or a plan with too many blocks for an arena."""
    smallest = swap_all_on_demand(problem)
    laid = layout_of(problem, smallest.schedule)
    return max(smallest.peak_bytes, laid.peak_bytes if laid is not None else 0)


def kept_in_arena(profile: Profile) -> Laid | None:
    """The layout of the step that keeps everything; None if it has too many blocks for an arena."""
    problem = Problem.of(profile)
    return layout_of(problem, keep_all(problem))

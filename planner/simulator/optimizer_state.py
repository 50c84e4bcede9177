"""Optimizer state that a plan streams: chunks of an optimizer's parameters, and the step in which the state of some of
them is in the host tier between steps of the optimizer. ``docs/optimizer-state.md`` has the exact meaning.

For the planner streaming is a view of a profile, as sources are: the streamed values take no bytes, a *window* takes
some during the optimizer's ops, and its last op is longer. :func:`with_state` makes that view.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import ceil
from operator import attrgetter

from msgspec.structs import replace

from poochplan.errors import ModelMismatchError
from poochplan.formats.plan import StateChunk
from poochplan.formats.profile import Kind, Link, Op, Phase, Profile, Value
from poochplan.formats.profile_parts import OptimizerState

STATE = "state"
"""The name by which ``plan`` leaves all of it on the device."""
LEAST_CHUNK_BYTES = 16 << 20
"""A chunk has about this many bytes of state, or more: beside so long a copy its latency is little."""
CHUNKS = 64
"""If that gives more chunks than this, they are larger. The device holds up to three streamed ones at once."""
LEAST_MADE_BYTES = 1 << 16
"""Smaller temporaries of the optimizers' ops count as they are."""
WINDOW = "streamed optimizer state"
"""The name of the value that stands for the streamed chunks on the device."""


def chunks_of(profile: Profile) -> tuple[StateChunk, ...]:
    """All state that may leave, in chunks in the order of the step; empty if there is none. None of it is streamed."""
    sizes = [_sizes(profile, optimizer) for optimizer in profile.optimizers]
    goal_bytes = max(LEAST_CHUNK_BYTES, sum(map(sum, sizes)) // CHUNKS)
    found = list[StateChunk]()
    for number, own in enumerate(sizes):
        if sum(own):
            goal = goal_bytes if profile.optimizers[number].separable else sum(own)
            found += _chunks(number, own, goal)
    return tuple(found)


def _sizes(profile: Profile, optimizer: OptimizerState) -> list[int]:
    """By parameter: bytes of its state that may leave, each value rounded up."""
    return [sum(profile.rounded_bytes(profile.values[one].size_bytes) for one in own) for own in optimizer.parameters]


def _chunks(optimizer: int, sizes: Sequence[int], goal_bytes: int) -> Iterator[StateChunk]:
    """Consecutive parameters, as many as their state is at most ``goal_bytes``, but at least one that has state."""
    first, held_bytes = 0, 0
    for place, size_bytes in enumerate(sizes):
        if size_bytes and held_bytes and held_bytes + size_bytes > goal_bytes:
            yield StateChunk(optimizer=optimizer, first=first, count=place - first, size_bytes=held_bytes)
            first, held_bytes = place, 0
        held_bytes += size_bytes
    yield StateChunk(optimizer=optimizer, first=first, count=len(sizes) - first, size_bytes=held_bytes)


def streamed(chunks: Sequence[StateChunk], count: int) -> tuple[StateChunk, ...]:
    """``Plan.state`` if the last ``count`` of these chunks are streamed: kept ones are stepped first, beside the first
    copy in. Optimizers that keep all of theirs are left out.
    """
    kept = len(chunks) - count
    found = [replace(chunk, streamed=place >= kept) for place, chunk in enumerate(chunks)]
    moved = {chunk.optimizer for chunk in found if chunk.streamed}
    return tuple(chunk for chunk in found if chunk.optimizer in moved)


def all_streamed(profile: Profile) -> tuple[StateChunk, ...]:
    """``Plan.state`` if all state that may leave is streamed."""
    chunks = chunks_of(profile)
    return streamed(chunks, len(chunks))


def streamed_bytes(chunks: Sequence[StateChunk]) -> int:
    """Bytes of state in the host tier between steps of the optimizer."""
    return sum(chunk.size_bytes for chunk in chunks if chunk.streamed)


def check_state(profile: Profile, chunks: Sequence[StateChunk]) -> None:
    """Raises ``ModelMismatchError`` unless these are chunks of the profile's optimizers."""
    for number, chunk in enumerate(chunks):
        sizes = list[int]()
        if chunk.optimizer < len(profile.optimizers):
            sizes = _sizes(profile, profile.optimizers[chunk.optimizer])
        end = chunk.first + chunk.count
        if end > len(sizes) or sum(sizes[chunk.first : end]) != chunk.size_bytes:
            raise ModelMismatchError(
                f"the plan was made from another profile: expected {chunk.size_bytes} bytes of optimizer state in its "
                f"chunk {number}, found other parameters; name the profile that the plan was made from, or plan again"
            )


def with_state(profile: Profile, chunks: Sequence[StateChunk]) -> Profile:
    """The step in which these chunks (``Plan.state``) are stepped one after another, and some are streamed."""
    if not chunks:
        return profile
    return _streaming(profile, chunks)


def window_bytes(chunks: Sequence[StateChunk], made_bytes: Sequence[int] | None = None) -> int:
    """Most bytes on the device at once while a chunk is stepped: of streamed state, and what is made of the chunk's
    state, ``made_bytes`` by chunk.
    """
    most_bytes, made = 0, iter(made_bytes or [0] * len(chunks))
    for own in _by_optimizer(chunks):
        sizes, passed = [chunk.size_bytes for chunk in own if chunk.streamed], 0
        for chunk in own:
            first = max(0, passed - (1 if chunk.streamed else 2))
            most_bytes = max(most_bytes, sum(sizes[first : passed + 1 + chunk.streamed]) + next(made))
            passed += chunk.streamed
    return most_bytes


def added_seconds(profile: Profile, chunks: Sequence[StateChunk]) -> float:
    """Seconds by which streaming makes the step longer."""
    own_s = sum(op.duration_s for op in profile.ops if op.phase is Phase.OPTIMIZER)
    if _last_op(profile) < 0 or not chunks:
        return 0.0
    all_bytes = sum(sum(_sizes(profile, optimizer)) for optimizer in profile.optimizers)
    added_s = 0.0
    for own in _by_optimizer(chunks):
        step_s = own_s * sum(chunk.size_bytes for chunk in own) / all_bytes
        added_s += max(0.0, optimizer_seconds(profile.link, own, step_s) - step_s)
    return added_s


def optimizer_seconds(link: Link, chunks: Sequence[StateChunk], step_s: float) -> float:
    """Seconds of the step of one optimizer with these chunks, which takes ``step_s`` with all its state on the device.

    Three queues follow each other: copies in, steps of chunks, copies out.
    """
    all_bytes, sizes = sum(chunk.size_bytes for chunk in chunks), [one.size_bytes for one in chunks if one.streamed]
    now_s, is_in_s, is_out_s = 0.0, list[float](), list[float]()

    def fetch(place: int) -> None:
        begin_s = max([now_s, *is_in_s[-1:]])
        is_in_s.append(begin_s + link.in_seconds(sizes[place]) / link.duplex)

    if sizes:
        fetch(0)
    for chunk in chunks:
        place = len(is_out_s)
        if chunk.streamed:
            now_s = max([now_s, *is_out_s[place - 2 : place - 1]]) if place >= 2 else now_s
            if place + 1 < len(sizes):
                fetch(place + 1)
            now_s = max(now_s, is_in_s[place])
        now_s += step_s * chunk.size_bytes / all_bytes
        if chunk.streamed:
            is_out_s.append(max([now_s, *is_out_s[-1:]]) + link.out_seconds(chunk.size_bytes) / link.duplex)
    return max([now_s, *is_out_s[-1:]])


def _by_optimizer(chunks: Sequence[StateChunk]) -> Iterator[list[StateChunk]]:
    return (list(own) for _, own in groupby(chunks, attrgetter("optimizer")))


def _last_op(profile: Profile) -> int:
    """The last op of the optimizers; -1 if there is none, as in a micro-step that only accumulates."""
    return max((place for place, op in enumerate(profile.ops) if op.phase is Phase.OPTIMIZER), default=-1)


# -- the view ---------------------------------------------------------------------------------------------------------


def _streaming(profile: Profile, chunks: Sequence[StateChunk]) -> Profile:
    made = _Made.of(profile, chunks)
    away = {value for chunk in chunks if chunk.streamed for value in _values(profile, chunk)}
    gone = away | made.values.keys()
    values = [replace(value, size_bytes=0) if place in gone else value for place, value in enumerate(profile.values)]
    ops = [made.without(op) if place in made.ops else op for place, op in enumerate(profile.ops)]
    last = _last_op(profile)
    if last >= 0:
        ops[last] = replace(ops[last], duration_s=ops[last].duration_s + added_seconds(profile, chunks))
        window = window_bytes(chunks, made.most_bytes(profile, len(chunks)))
        values += [_window(profile, window)] if window else []
    plain_s, kind = profile.times.plain_step_s, str(Kind.OPTIMIZER_STATE)
    times = replace(profile.times, plain_step_s=_step_s(profile) if plain_s is None else plain_s)
    left_bytes = max(0, profile.static_bytes.get(kind, 0) - sum(profile.values[place].size_bytes for place in away))
    static = profile.static_bytes | ({kind: left_bytes} if kind in profile.static_bytes else {})
    return replace(profile, values=tuple(values), ops=tuple(ops), times=times, static_bytes=static)


def _values(profile: Profile, chunk: StateChunk) -> list[int]:
    """The values of a chunk's state that may leave."""
    own = profile.optimizers[chunk.optimizer].parameters[chunk.first : chunk.first + chunk.count]
    return [value for one in own for value in one]


def _step_s(profile: Profile) -> float:
    total_s = 0.0
    for op in profile.ops:
        total_s += op.duration_s
    return total_s


def _window(profile: Profile, size_bytes: int) -> Value:
    """The memory of streamed chunks, from the first op of the optimizers to the end of the step."""
    first = next(place for place, op in enumerate(profile.ops) if op.phase is Phase.OPTIMIZER)
    last_tick = profile.tick_count - 1
    return Value(
        name=WINDOW,
        layer="",
        kind=Kind.OPTIMIZER_STATE,
        size_bytes=size_bytes,
        dtype="uint8",
        shape=(size_bytes,),
        born=max(0, first - 1),
        born_tick=profile.op_ticks[first],
        forward_death=last_tick,
        freed=last_tick,
        gone_by_next=True,
    )


Parts = dict[int, Fraction]
"""By chunk: its share of something."""


@dataclass(frozen=True)
class _Made:
    """What the optimizers' ops make of state: they make each chunk's part while that is stepped."""

    values: dict[int, Parts]
    """By temporary, without small ones."""
    ops: dict[int, Parts]
    """By op that reads or writes state, or what was made of it."""

    @staticmethod
    def of(profile: Profile, chunks: Sequence[StateChunk]) -> _Made:
        found, chunk_of = _Made({}, {}), {value: n for n, one in enumerate(chunks) for value in _values(profile, one)}
        for place, op in enumerate(profile.ops):
            if op.phase is Phase.OPTIMIZER:
                weights = Counter[int]()
                for value in {*op.inputs, *op.writes}:
                    size_bytes = profile.values[value].size_bytes
                    parts = {chunk_of[value]: 1} if value in chunk_of else found.values.get(value, {})
                    weights.update({chunk: size_bytes * share for chunk, share in parts.items()})
                if weights:
                    whole = sum(weights.values())
                    found.ops[place] = {chunk: Fraction(weight, whole) for chunk, weight in weights.items()}
                    found.values.update({value: found.ops[place] for value in op.outputs if _counts(profile, value)})
        return found

    def most_bytes(self, profile: Profile, count: int) -> list[int]:
        """By chunk: the most that is live at once of what is made of its state, or within an op."""
        most, ends = [0] * count, defaultdict[int, list[int]](list)
        live = [Fraction(0)] * count
        for place, within in self.ops.items():
            op = profile.ops[place]
            for tick in [tick for tick in ends if tick < profile.op_ticks[place]]:
                for value in ends.pop(tick):
                    self._add(live, self.values[value], -profile.rounded_bytes(profile.values[value].size_bytes))
            for value in op.outputs:
                if value in self.values:
                    self._add(live, self.values[value], profile.rounded_bytes(profile.values[value].size_bytes))
                    ends[profile.values[value].freed].append(value)
            for chunk, share in within.items():
                most[chunk] = max(most[chunk], ceil(live[chunk] + op.workspace_bytes * share))
        return most

    @staticmethod
    def _add(live: list[Fraction], parts: Parts, size_bytes: int) -> None:
        for chunk, share in parts.items():
            live[chunk] += size_bytes * share

    @staticmethod
    def without(op: Op) -> Op:
        """The op, whose memory the window has."""
        return replace(op, workspace_bytes=0, blocks=tuple(block._replace(size_bytes=0) for block in op.blocks))


def _counts(profile: Profile, value: int) -> bool:
    """Whether a value that an op makes of state is made by chunks: small ones are not told apart."""
    one = profile.values[value]
    return one.kind is Kind.TEMPORARY and one.size_bytes >= LEAST_MADE_BYTES

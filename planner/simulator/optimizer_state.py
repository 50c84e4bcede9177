"""Optimizer state that a plan streams: chunks of an optimizer's parameters, and the step in which the state of some of
them is in the host tier between steps of the optimizer. ``docs/optimizer-state.md`` has the exact meaning.

For the planner streaming is a view of a profile, as sources are: the streamed values take no bytes, a *window* takes
some during the optimizer's ops, and its last op is longer. :func:`with_state` makes that view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
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
CHUNKS = 32
"""If that gives more chunks than this, they are larger. The device holds up to three streamed ones at once."""
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
    return _streaming(profile, chunks, window_bytes(chunks), added_seconds(profile, chunks))


def between(profile: Profile, fewest: Sequence[StateChunk], most: Sequence[StateChunk]) -> Profile:
    """A step that is no longer, and takes no more bytes, than any that streams from ``fewest`` to ``most`` of the same
    chunks: for bounds.
    """
    if not most:
        return profile
    return _streaming(profile, most, window_bytes(fewest), added_seconds(profile, fewest))


def window_bytes(chunks: Sequence[StateChunk]) -> int:
    """Most bytes of streamed state that are on the device at once: of three consecutive streamed chunks."""
    most_bytes = 0
    for own in _by_optimizer(chunks):
        sizes = [chunk.size_bytes for chunk in own if chunk.streamed]
        most_bytes = max([most_bytes, *(sum(sizes[place : place + 3]) for place in range(len(sizes)))])
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


def _streaming(profile: Profile, chunks: Sequence[StateChunk], window: int, added_s: float) -> Profile:
    shrinks = _Shrinks.of(profile, chunks)
    away = {
        value
        for chunk in chunks
        if chunk.streamed
        for own in profile.optimizers[chunk.optimizer].parameters[chunk.first : chunk.first + chunk.count]
        for value in own
    }
    values = [
        replace(value, size_bytes=0 if place in away else shrinks.size(value.size_bytes, shrinks.values.get(place)))
        for place, value in enumerate(profile.values)
    ]
    ops = [shrinks.op(op, shrinks.ops.get(place)) for place, op in enumerate(profile.ops)]
    last = _last_op(profile)
    if last >= 0:
        ops[last] = replace(ops[last], duration_s=ops[last].duration_s + added_s)
        values += [_window(profile, window)] if window else []
    plain_s, kind = profile.times.plain_step_s, str(Kind.OPTIMIZER_STATE)
    times = replace(profile.times, plain_step_s=_step_s(profile) if plain_s is None else plain_s)
    left_bytes = max(0, profile.static_bytes.get(kind, 0) - sum(profile.values[place].size_bytes for place in away))
    static = profile.static_bytes | ({kind: left_bytes} if kind in profile.static_bytes else {})
    return replace(profile, values=tuple(values), ops=tuple(ops), times=times, static_bytes=static)


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


@dataclass(frozen=True)
class _Shrinks:
    """What an optimizer's ops make from the state of several chunks: they make it of one chunk at a time."""

    share: dict[int, tuple[int, int]]
    """By optimizer: bytes of its largest chunk, and of all its chunks."""
    ops: dict[int, int]
    """By op that does so: the optimizer."""
    values: dict[int, int]
    """By temporary that such an op makes: the optimizer."""

    @staticmethod
    def of(profile: Profile, chunks: Sequence[StateChunk]) -> _Shrinks:
        found = _Shrinks({}, {}, {})
        chunk_of = dict[int, tuple[int, int]]()  # by value of state
        for place, chunk in enumerate(chunks):
            parameters = profile.optimizers[chunk.optimizer].parameters[chunk.first : chunk.first + chunk.count]
            chunk_of |= {value: (chunk.optimizer, place) for own in parameters for value in own}
            largest, whole = found.share.get(chunk.optimizer, (0, 0))
            found.share[chunk.optimizer] = max(largest, chunk.size_bytes), whole + chunk.size_bytes
        for place, op in enumerate(profile.ops):
            if op.phase is not Phase.OPTIMIZER:
                continue
            touched = {*op.inputs, *op.writes}
            together = Counter(optimizer for optimizer, _ in {chunk_of[one] for one in touched if one in chunk_of})
            of = {optimizer for optimizer, count in together.items() if count > 1}
            of |= {found.values[value] for value in touched if value in found.values}
            if of:
                found.ops[place] = min(of)
                made = (value for value in op.outputs if profile.values[value].kind is Kind.TEMPORARY)
                found.values.update(dict.fromkeys(made, min(of)))
        return found

    def size(self, size_bytes: int, optimizer: int | None) -> int:
        """The bytes that remain of those for all chunks."""
        if optimizer is None:
            return size_bytes
        largest, whole = self.share[optimizer]
        return -(-size_bytes * largest // whole)

    def op(self, op: Op, optimizer: int | None) -> Op:
        if optimizer is None:
            return op
        blocks = tuple(block._replace(size_bytes=self.size(block.size_bytes, optimizer)) for block in op.blocks)
        return replace(op, workspace_bytes=self.size(op.workspace_bytes, optimizer), blocks=blocks)

"""The cost of recomputing a saved value: ops to run again, saved values to start from, bytes along the way.

The rules are those of ``docs/semantics.md``, "Replay of a value". A forward value has *writers* (the op that created
it, then every op that writes it in place); *version* ``g`` is its content after writer ``g``. A gathered weight (FSDP2)
has memory only in *stretches* of the step: in the unit's forward, and around its backward. Replays must find it there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from poochplan.formats.occupancy import born_ticks, ints, occupancy
from poochplan.formats.profile import Kind, Op, Phase, Profile
from poochplan.formats.queries import writers_by_value

from .sources import is_source


def in_order(seconds: Iterable[float]) -> float:
    """The sum, added one after another: from Python 3.12 on ``sum`` rounds differently, and results must stay the
    same.
    """
    total = 0.0
    for more in seconds:
        total += more
    return total


@dataclass(frozen=True)
class Replay:
    """How one saved value is recomputed on its own."""

    ops: tuple[int, ...]
    """Ops to run, in their original order."""
    inputs: tuple[int, ...]
    """Saved values (by position) it starts from; parameters and inputs of the step are not listed."""
    seconds: float


@dataclass(frozen=True)
class MergedReplay(Replay):
    """One replay that brings back one or more saved values; its inputs are without these."""

    targets: tuple[int, ...]
    """The saved values that it brings back, in ascending order."""
    peak_bytes: int
    """Most bytes it holds at any moment beyond what was live before: its targets, temporaries and workspace."""


@dataclass(frozen=True, eq=False)
class ReplayGraph:
    """Replays of all saved values of a profile."""

    replays: tuple[Replay | None, ...]
    """Per saved value; None if it cannot be recomputed."""
    reasons: tuple[str, ...]
    """Per saved value: why it cannot be recomputed; empty if it can."""
    value_of: tuple[int, ...]
    """Per saved value: its value in the profile."""
    op_seconds: tuple[float, ...]
    op_workspace_bytes: tuple[int, ...]
    """Per op in a replay, including the temporary buffers for running statistics."""
    op_outputs: tuple[tuple[int, ...], ...]
    op_temporaries: tuple[tuple[int, ...], ...]
    """Per op: the values it reads or writes in a version that only a replay can give."""
    value_bytes: tuple[int, ...]
    value_writers: tuple[tuple[int, ...], ...]
    """Per value: the forward ops that create or write it, in order."""
    earliest_tick: tuple[int, ...] = ()
    """Per saved value: no replay of it may run before this tick; empty if no replay reads a gathered weight."""
    makers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By source: the ops that make its larger copy. The runtime finds the source by these."""
    _merged: dict[tuple[int, ...], MergedReplay] = field(default_factory=dict, repr=False)

    def of(self, value: int) -> Replay:
        """The replay of a saved value that has one."""
        replay = self.replays[value]
        assert replay is not None
        return replay

    def to_record(self, ops: Iterable[int]) -> set[int]:
        """Everything that must be recorded so that ``ops`` can be replayed: these ops, and every other writer of their
        temporaries.

        The runtime distinguishes contents by the writes that it has recorded. Chunks of one storage can have separate
        version counters, so an unrecorded write may leave no trace.
        """
        wanted = set(ops)
        temporaries = {value for op in wanted for value in self.op_temporaries[op]}
        return wanted.union(*(self.value_writers[value] for value in temporaries))

    def recorded_by(self, value: int) -> set[int]:
        """What must be recorded so that the replay of a saved value, which has one, can run."""
        replay = self.of(value)
        makers = (op for source in replay.inputs for op in self.makers.get(source, ()))
        return self.to_record(replay.ops).union(makers)

    def recorded_for(self, values: Sequence[int]) -> NDArray[np.int64]:
        """What must be recorded so that replays of these saved values, which have one, can run; ascending."""
        together = np.bitwise_or.reduce(self._recorded_bits[values], axis=0)
        return np.flatnonzero(np.unpackbits(together, count=len(self.op_seconds)))

    @cached_property
    def _recorded_bits(self) -> NDArray[np.uint8]:
        """The same for each value: a row of bits, one per op."""
        needed = np.zeros((len(self.replays), len(self.op_seconds)), dtype=bool)
        for value, replay in enumerate(self.replays):
            if replay is not None:
                needed[value, list(self.recorded_by(value))] = True
        return np.packbits(needed, axis=1)

    def merged(self, targets: tuple[int, ...]) -> MergedReplay:
        """The replay that brings back ``targets`` (sorted, all replayable) together; shared ops run once."""
        found = self._merged.get(targets)
        if found is None:
            ops = tuple(sorted({op for target in targets for op in self.of(target).ops}))
            inputs = {source for target in targets for source in self.of(target).inputs}
            found = self._merged[targets] = MergedReplay(
                ops=ops,
                inputs=tuple(sorted(inputs.difference(targets))),
                seconds=in_order(self.op_seconds[op] for op in ops),
                targets=targets,
                peak_bytes=self._peak(ops, {self.value_of[target] for target in targets}),
            )
        return found

    def lives(self, ops: Sequence[int], kept: Set[int]) -> list[tuple[int, int, int]]:
        """The values that a replay with these ``ops`` makes: (value, position of the op that creates it, position up to
        which it lives).

        Values of ``kept`` live to the end of the replay, temporaries to the last op that reads or writes them.
        """
        last_touch = {value: position for position, op in enumerate(ops) for value in self.op_temporaries[op]}
        end = len(ops) - 1
        return [
            (value, position, end if value in kept else last_touch.get(value, position))
            for position, op in enumerate(ops)
            for value in self.op_outputs[op]
        ]

    def _peak(self, ops: Sequence[int], kept: Set[int]) -> int:
        lives = self.lives(ops, kept)
        each = range(len(ops))
        live = occupancy(
            len(ops),
            (
                ints(born for _, born, _ in lives),
                ints(last for _, _, last in lives),
                ints(self.value_bytes[value] for value, _, _ in lives),
            ),
            (ints(each), ints(each), ints(self.op_workspace_bytes[op] for op in ops)),
        )
        return int(live.max(initial=0))


@dataclass(frozen=True)
class _Versions:
    """The version of a value that each forward op reads, and the version that is saved; and when saved values are."""

    profile: Profile
    writers: Sequence[Sequence[int]]
    saved_of: Sequence[int]
    """Position of each value among the saved values, or -1."""
    value_of: Sequence[int]
    """Its inverse."""
    saved_version: Sequence[int]
    save_tick: Sequence[int]
    first_use_tick: Sequence[int]

    def read_by(self, value: int, op: int) -> int:
        return bisect_left(self.writers[value], op)

    def is_entry(self, value: int, version: int) -> bool:
        """Whether readers of this version find it in the value's entry, so that no op is replayed for it."""
        saved = self.saved_of[value]
        return saved >= 0 and self.saved_version[saved] == version

    def is_preexisting(self, value: int) -> bool:
        """Whether no replay rebuilds the value; also true of a gathered weight."""
        record = self.profile.values[value]
        return record.born < 0 or record.stretch_of >= 0


def build_replay_graph(
    profile: Profile,
    saved_of: Sequence[int],
    value_of: Sequence[int],
    save_op: Sequence[int],
    save_tick: Sequence[int],
    first_use_tick: Sequence[int],
    copies: Mapping[int, int],
) -> ReplayGraph:
    """Replays of the saved values.

    ``saved_of`` maps a value to its position among the saved values or -1; ``value_of`` is its inverse; ``save_op``
    holds the ops completed before each save point. ``copies`` has the larger copy of each source.
    """
    writers = writers_by_value(profile)
    saved_version = [bisect_left(writers[value], save_op[i]) for i, value in enumerate(value_of)]
    versions = _Versions(profile, writers, saved_of, value_of, saved_version, save_tick, first_use_tick)
    found = [_replay_of(versions, saved) for saved in range(len(value_of))]
    if copies:
        _from_sources(versions, found, copies)
    replays, reasons = [replay for replay, _ in found], [reason for _, reason in found]
    earliest_tick = _within_stretches(profile, replays, reasons, first_use_tick)
    return ReplayGraph(
        replays=tuple(replays),
        reasons=tuple(reasons),
        value_of=tuple(value_of),
        op_seconds=tuple(op.duration_s for op in profile.ops),
        op_workspace_bytes=tuple(_workspace_bytes(profile, op) for op in profile.ops),
        op_outputs=tuple(op.outputs for op in profile.ops),
        op_temporaries=tuple(_temporaries(versions, index) for index in range(len(profile.ops))),
        value_bytes=tuple(profile.rounded_bytes(value.size_bytes) for value in profile.values),
        value_writers=tuple(map(tuple, writers)),
        earliest_tick=earliest_tick,
        makers={source: tuple(writers[value_of[copy]]) for source, copy in copies.items()},
    )


def _from_sources(versions: _Versions, found: list[tuple[Replay | None, str]], copies: Mapping[int, int]) -> None:
    """Leaves out the replays that only sources make possible, except for the copies' own op.

    No profile has verified them: it has tried replays that start from values that autograd saves. Such a replay runs
    the same ops and more.
    """
    saved_of = [-1 if place in copies else place for place in versions.saved_of]
    without = replace(versions, saved_of=saved_of)
    tried = [_replay_of(without, saved) for saved in range(len(found))]
    own = {copy: source for source, copy in copies.items()}
    for saved, (replay, _) in enumerate(found):
        is_widening = replay is not None and saved in own and replay.inputs == (own[saved],) and len(replay.ops) == 1
        missing, reason = tried[copies.get(saved, saved)]
        if missing is None and not is_widening:
            found[saved] = None, reason


def _within_stretches(
    profile: Profile, replays: list[Replay | None], reasons: list[str], first_use_tick: Sequence[int]
) -> tuple[int, ...]:
    """Removes replays that may not find a gathered weight. Returns the first tick at which each other one may run: from
    there to its value's first use, all weights that it may read have memory.

    A replay runs at the first use of its value, or at that of a value whose replay starts from it. A value may be
    recomputed only if its replay finds its weights at each of these ticks, for any decisions on other values.
    """
    stretches: dict[int, list[tuple[int, int]]] = {}  # first and last tick of each, by the value of the weight's first
    numbers = [number for number, value in enumerate(profile.values) if value.stretch_of >= 0]
    for number, born in zip(numbers, born_ticks(profile, numbers).tolist(), strict=True):
        stretches.setdefault(profile.values[number].stretch_of, []).append((born, profile.values[number].freed))
    if not stretches:
        return ()
    reads = [set[int]() if replay is None else _gathered(profile, replay.ops) for replay in replays]
    asked = [{tick} if tick < profile.tick_count else set[int]() for tick in first_use_tick]
    by_last_op = sorted((replay.ops[-1], value, replay) for value, replay in enumerate(replays) if replay is not None)
    for _, value, replay in reversed(by_last_op):  # a replay that starts from a value has a later last op
        away = [one for one in reads[value] if not all(_around(stretches[one], tick) for tick in asked[value])]
        if away:
            is_own = not _around(stretches[min(away)], first_use_tick[value])
            when = "it is used" if is_own else "another value's replay may start from it"
            reasons[value] = f"its input {profile.values[min(away)].name} is not gathered when {when}"
            replays[value] = None
            continue
        for source in replay.inputs:
            asked[source] |= asked[value]
    earliest = [0] * len(replays)
    for _, value, replay in by_last_op:
        if replays[value] is not None:
            reads[value].update(*(reads[source] for source in replay.inputs if replays[source] is not None))
            around = (_around(stretches[one], first_use_tick[value]) for one in reads[value])
            earliest[value] = max((one[0] for one in around if one), default=0)
    return tuple(earliest)


def _gathered(profile: Profile, ops: Sequence[int]) -> set[int]:
    """The gathered weights that these ops read, by their first stretches."""
    read = {value for op in ops for value in profile.ops[op].inputs}
    return {profile.values[value].stretch_of for value in read} - {-1}


def _around(stretches: Sequence[tuple[int, int]], tick: int) -> tuple[int, int] | None:
    """The stretch that has the tick; None if the weight has no memory then."""
    return next((one for one in stretches if one[0] <= tick <= one[1]), None)


def _workspace_bytes(profile: Profile, op: Op) -> int:
    """Bytes besides inputs and outputs while a replay runs ``op``, with temporary buffers for running statistics.

    The operator's name shows whether it has them: PyTorch does not declare that batch normalisation writes them.
    """
    touched = {*op.inputs, *op.writes} if "batch_norm" in op.name else ()
    buffers = [profile.values[v].size_bytes for v in touched if profile.values[v].kind is Kind.BUFFER]
    return profile.rounded_bytes(op.workspace_bytes) + sum(profile.rounded_bytes(size) for size in buffers)


def _temporaries(versions: _Versions, op: int) -> tuple[int, ...]:
    record = versions.profile.ops[op]
    if record.phase is not Phase.FORWARD:
        return ()
    return tuple(
        value
        for value in dict.fromkeys((*record.inputs, *record.writes))
        if not versions.is_preexisting(value) and not versions.is_entry(value, versions.read_by(value, op))
    )


def _replay_of(versions: _Versions, saved: int) -> tuple[Replay | None, str]:
    profile, writers = versions.profile, versions.writers
    target = versions.value_of[saved]
    version = versions.saved_version[saved]
    if profile.values[target].unreplayable:
        return None, profile.values[target].unreplayable
    if profile.values[target].born < 0 or version == 0:
        return None, "it was there before the step"
    if version != len(writers[target]):
        return None, "it is written in place after it was saved"
    ops: set[int] = set()
    inputs: set[int] = set()
    pending = list(writers[target][:version])
    while pending:
        op = pending.pop()
        if op in ops:
            continue
        ops.add(op)
        record = profile.ops[op]
        if record.opaque:
            return None, f"{record.name} of {record.layer or 'the step'} cannot be replayed"
        for value in dict.fromkeys((*record.inputs, *record.writes)):
            read = versions.read_by(value, op)
            if versions.is_preexisting(value):
                reason = _preexisting_reason(versions, value, op, read, versions.first_use_tick[saved])
            elif versions.is_entry(value, read):
                inputs.add(versions.saved_of[value])
                reason = _entry_reason(versions, value, versions.save_tick[saved])
            else:
                reason = profile.values[value].unreplayable
                pending.extend(writers[value][:read])
            if reason:
                return None, reason
    ordered = tuple(sorted(ops))
    return Replay(ordered, tuple(sorted(inputs)), in_order(profile.ops[op].duration_s for op in ordered)), ""


def _preexisting_reason(versions: _Versions, value: int, op: int, read: int, needed_tick: int) -> str:
    """Why ``op`` cannot read a value from before the step again at ``needed_tick``; empty if it can."""
    record = versions.profile.values[value]
    if record.stretch_of < 0 and record.freed < min(needed_tick, versions.profile.tick_count - 1):
        return f"its input {record.name} is gone before backward"
    if value in versions.profile.ops[op].writes:
        # Running statistics: the runtime replays such an op without updating them again.
        return "" if record.kind is Kind.BUFFER else f"replaying it would write {record.name} again"
    if read != len(versions.writers[value]):
        return f"its input {record.name} is written in place after it was read"
    return ""


def _entry_reason(versions: _Versions, value: int, save_tick: int) -> str:
    """Why a replay of a value saved at ``save_tick`` cannot use the entry of a saved value; empty if it can."""
    record, entry = versions.profile.values[value], versions.saved_of[value]
    if is_source(record):  # no handle holds it: the plan does, from its save point on
        return ""
    if versions.saved_version[entry] != len(versions.writers[value]):
        return f"its input {record.name} is written in place after it was saved"
    if versions.save_tick[entry] < save_tick and record.freed < save_tick:
        return f"its input {record.name} is freed before the value is saved"
    return ""

"""The cost of recomputing a saved value: ops to run again, saved values to start from, bytes along the way.

The rules are those of ``docs/semantics.md``, "Replay of a value". A forward value has *writers* (the op that created
it, then every op that writes it in place); *version* ``g`` is its content after writer ``g``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from poochplan.formats.occupancy import ints, occupancy
from poochplan.formats.profile import Kind, Op, Phase, Profile

from .gathered import Stretches, reach_of


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
class MergedReplay:
    """One replay that brings back one or more saved values."""

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    """Saved values that must be resident before it, without its targets."""
    seconds: float
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
    _merged: dict[tuple[int, ...], MergedReplay] = field(default_factory=dict, repr=False)

    def of(self, value: int) -> Replay:
        """The replay of a saved value that has one."""
        replay = self.replays[value]
        assert replay is not None
        return replay

    def may_run(self, value: int, tick: int) -> bool:
        """Whether all gathered weights that a replay of the value may read have memory then, and to its first use."""
        return not self.earliest_tick or tick >= self.earliest_tick[value]

    def to_record(self, ops: Iterable[int]) -> set[int]:
        """Everything that must be recorded so that ``ops`` can be replayed: these ops, and every other writer of their
        temporaries.

        The runtime distinguishes contents by the writes that it has recorded. Chunks of one storage can have separate
        version counters, so an unrecorded write may leave no trace.
        """
        wanted = set(ops)
        temporaries = {value for op in wanted for value in self.op_temporaries[op]}
        return wanted.union(*(self.value_writers[value] for value in temporaries))

    def recorded_for(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Everything that must be recorded so that replays of these saved values, which have one, can run;
        ascending.
        """
        together = np.bitwise_or.reduce(self._recorded_bits[values], axis=0)
        return np.flatnonzero(np.unpackbits(together, count=len(self.op_seconds)))

    @cached_property
    def _recorded_bits(self) -> NDArray[np.uint8]:
        """The same for each value: a row of bits, one per op."""
        needed = np.zeros((len(self.replays), len(self.op_seconds)), dtype=bool)
        for value, replay in enumerate(self.replays):
            if replay is not None:
                needed[value, list(self.to_record(replay.ops))] = True
        return np.packbits(needed, axis=1)

    def merged(self, targets: tuple[int, ...]) -> MergedReplay:
        """The replay that brings back ``targets`` (sorted, all replayable) together; shared ops run once."""
        found = self._merged.get(targets)
        if found is None:
            found = self._merge(targets)
            self._merged[targets] = found
        return found

    def _merge(self, targets: tuple[int, ...]) -> MergedReplay:
        op_set: set[int] = set()
        inputs: set[int] = set()
        for target in targets:
            op_set.update(self.of(target).ops)
            inputs.update(self.of(target).inputs)
        ops = tuple(sorted(op_set))
        return MergedReplay(
            ops=ops,
            inputs=tuple(sorted(inputs.difference(targets))),
            seconds=in_order(self.op_seconds[op] for op in ops),
            peak_bytes=self._peak(ops, {self.value_of[target] for target in targets}),
        )

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
    """The version of a value that each forward op reads, and the version that is saved."""

    profile: Profile
    writers: Sequence[Sequence[int]]
    saved_of: Sequence[int]
    saved_version: Sequence[int]

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
) -> ReplayGraph:
    """Replays of the saved values.

    ``saved_of`` maps a value to its position among the saved values or -1; ``value_of`` is its inverse; ``save_op``
    holds the ops completed before each save point.
    """
    writers: list[list[int]] = [[] for _ in profile.values]
    for index, op in enumerate(profile.ops):
        if op.phase is Phase.FORWARD:
            for value in (*op.outputs, *op.writes):
                writers[value].append(index)
    saved_version = [bisect_left(writers[value], save_op[i]) for i, value in enumerate(value_of)]
    versions = _Versions(profile, writers, saved_of, saved_version)
    replays: list[Replay | None] = []
    reasons: list[str] = []
    for saved in range(len(value_of)):
        replay, reason = _replay_of(versions, saved, value_of, save_tick, first_use_tick)
        replays.append(replay)
        reasons.append(reason)
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
    )


def _within_stretches(
    profile: Profile, replays: list[Replay | None], reasons: list[str], first_use_tick: Sequence[int]
) -> tuple[int, ...]:
    """Removes replays that may not find a gathered weight. Returns the first tick at which each other one may run."""
    stretches = Stretches.in_profile(profile)
    if not stretches.of:
        return ()
    found = reach_of(
        stretches,
        [() if one is None else one.ops for one in replays],
        [() if one is None else one.inputs for one in replays],
        first_use_tick,
    )
    for value, reason in enumerate(found.reasons):
        if reason:
            replays[value], reasons[value] = None, reason
    return found.earliest_tick


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


def _replay_of(
    versions: _Versions, saved: int, value_of: Sequence[int], save_tick: Sequence[int], first_use_tick: Sequence[int]
) -> tuple[Replay | None, str]:
    profile, writers = versions.profile, versions.writers
    target = value_of[saved]
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
                reason = _preexisting_reason(versions, value, op, read, first_use_tick[saved])
            elif versions.is_entry(value, read):
                inputs.add(versions.saved_of[value])
                reason = _entry_reason(versions, value, save_tick[saved], save_tick[versions.saved_of[value]])
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


def _entry_reason(versions: _Versions, value: int, save_tick: int, entry_save_tick: int) -> str:
    """Why a replay of a value saved at ``save_tick`` cannot use the entry of a saved value; empty if it can."""
    record = versions.profile.values[value]
    if versions.saved_version[versions.saved_of[value]] != len(versions.writers[value]):
        return f"its input {record.name} is written in place after it was saved"
    if entry_save_tick < save_tick and record.freed < save_tick:
        return f"its input {record.name} is freed before the value is saved"
    return ""

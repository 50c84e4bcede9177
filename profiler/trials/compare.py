"""Verification: every value that could be recomputed is recomputed once, and compared bitwise with the saved value.

Only this finds effects that the dispatcher does not see: a kernel that writes through numpy, or an operator that draws
random numbers without declaring it. A value is marked in the profile with the reason, and no plan recomputes it, if its
replay differs, changes memory from before the step, or raises, or if the runtime cannot replay it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec
import torch

from poochplan.formats.plan import Decision, Instructions, PlannedValue, PointActions
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import PointKind
from poochplan.formats.queries import saved_values
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.sources import is_source, sources_of
from poochplan.runtime.compiled_hooks import hooks_for
from poochplan.runtime.engine.engine import Engine
from poochplan.tensors.modes import AroundCall, around_compiled, hooked, unseen_by

from .verify_replays import Verify

MOST_ROUNDS = 5
MOST_TRIES = 3
"""Most steps until one follows the profile."""
WRITTEN_LATE = "written after it was saved, which no operator declares"
SOURCE_WRITTEN_LATE = "written after its copy was made, which no operator declares"
DIFFERS = "its replay gave other bits when it was tried"
RECORDED = "its step saves other bits where a mode records it"
UNVERIFIED = "its replay could not be verified: steps differ in what they save, or came once"


def verification(profile: Profile, *, is_tight: bool) -> Generator[Instructions, Verify, Profile]:
    """Asks for one step after another under :class:`Verify`. Returns the profile with ``unreplayable`` set on every
    value whose replay was tried and failed.

    If a replay in a step gives other bits, the earliest such value is marked and another step is run, because later
    values may differ only because their replays start from it. If memory ``is_tight``, two steps
    each try a part of the values.

    A step that diverges from its own profile is tried again, because steps may alternate. If no step follows it, values
    that no step has verified are not recomputed. Notes say where steps diverge, and why values were marked.
    """
    unverified = profile
    parts = 2 if is_tight else 1
    divergence = ""
    for remaining in reversed(range(MOST_ROUNDS)):
        verified: set[int] = set()
        trials = _trials(profile, parts)
        for _ in range(MOST_TRIES):
            tried: list[Verify] = []
            for trial in trials:
                tried.append((yield trial))
            divergence = divergence or next((one.divergence for one in tried if one.divergence), "")
            verified = verified.union(*(one.verified for one in tried))
            diverged = any(one.divergence for one in tried)
            if not diverged:
                break
        differing = sorted(index for one in tried for index in one.differing)
        refused = {index: reason for one in tried for index, reason in one.refused.items()}
        profile = _pinned(profile, tried)
        marked = differing if remaining == 0 or diverged else differing[:1]
        profile = _marked(profile, refused | dict.fromkeys(marked, DIFFERS))
        if diverged:
            profile = _marked(profile, dict.fromkeys(_recomputed(profile) - verified, UNVERIFIED))
        if diverged or not differing:
            break
    notes = [*profile.notes, *_refusal_notes(unverified, profile)]
    if divergence:
        note = f"steps differ in what they save, first at {divergence}; a step that is not the captured one "
        notes.append(note + "swaps all from there" + ("; what was not verified is not recomputed" if diverged else ""))
    return msgspec.structs.replace(profile, notes=tuple(notes))


def _refusal_notes(unverified: Profile, verified: Profile) -> list[str]:
    """A line for each reason why verification has marked values, except that no step matched the captured one."""
    names: dict[tuple[str, str], list[str]] = {}
    for before, after in zip(unverified.values, verified.values, strict=True):
        if after.pinned != before.pinned:
            ending = "never held for its copy" if is_source(after) else "kept, never swapped or recomputed"
            names.setdefault((ending, after.pinned), []).append(after.name)
        elif after.unreplayable not in (before.unreplayable, UNVERIFIED):
            names.setdefault(("kept or swapped, never recomputed", after.unreplayable), []).append(after.name)
    return [
        f"{those[0]} {f'and {len(those) - 1} more are' if len(those) > 1 else 'is'} {ending}: {reason}"
        for (ending, reason), those in names.items()
    ]


def _pinned(profile: Profile, tried: list[Verify]) -> Profile:
    """The profile in which values written late are only kept, and sources written late are none."""
    saves = saved_values(profile)
    reasons = {saves[index]: WRITTEN_LATE for one in tried for index in one.late_writes.values}
    copies = {saves[index] for one in tried for index in one.late_writes.copies}
    for number, source in sources_of(profile).items():
        if profile.handles[profile.points[number].handle].value in copies:
            reasons[source] = SOURCE_WRITTEN_LATE
    return _replaced(profile, "pinned", {one: profile.values[one].pinned or reason for one, reason in reasons.items()})


def _marked(profile: Profile, reasons: dict[int, str]) -> Profile:
    """The profile with these values marked; ``reasons`` are by save point."""
    saves = saved_values(profile)
    return _replaced(profile, "unreplayable", {saves[index]: reason for index, reason in reasons.items()})


def _replaced(profile: Profile, field: str, by_value: dict[int, str]) -> Profile:
    values = list(profile.values)
    for number, text in by_value.items():
        values[number] = msgspec.structs.replace(values[number], **{field: text})
    return msgspec.structs.replace(profile, values=tuple(values))


def without_replays(profile: Profile, reason: str = UNVERIFIED) -> Profile:
    """The profile with no value verified, for that reason."""
    return _marked(profile, dict.fromkeys(_recomputed(profile), reason))


def _recomputed(profile: Profile) -> set[int]:
    """Save points of the values that may be recomputed."""
    (trial,) = _trials(profile, 1)
    return {index for index, value in enumerate(trial.values) if value.decision is Decision.RECOMPUTE}


def _trials(profile: Profile, parts: int) -> list[Instructions]:
    """Instructions that together recompute every value that may be recomputed, each when it is first used.

    A single trial keeps all others. If there are several, each swaps the values of the other parts, so that memory
    stays about that of swapping everything. A replay that would read a gathered weight without memory is not tried.
    """
    saves, graph = saved_values(profile), Problem.of(profile).replay
    is_away = [bool(graph.earliest_tick) and replay is None for replay in graph.replays]
    part_of = parts_of(profile, parts) if parts > 1 else [0] * len(saves)
    rest = Decision.SWAP if parts > 1 else Decision.KEEP
    trials = []
    for part in range(parts):
        decisions = []
        for number, its_part, away in zip(saves, part_of, is_away, strict=True):
            value = profile.values[number]
            tried = its_part == part and not value.unreplayable and not away
            decisions.append(Decision.KEEP if value.pinned else Decision.RECOMPUTE if tried else rest)
        trials.append(instructions_for(profile, decisions))
    return trials


def parts_of(profile: Profile, parts: int) -> list[int]:
    """A part for each saved value, in the order of first packs, such that replays hold little beyond their own values.

    When one part's values are recomputed and all others swapped, a replay of a value brings back the values from which
    it starts: from the host, or, in its own part, by replaying them and all that they start from. With chains (the
    residual stream of a transformer) one replay could bring back the whole step. So each value, in the order of saving,
    goes to the part in which its replay holds the fewest bytes. With two parts that is at most 9% over the largest
    replay alone on the workloads of ``configs/``; taking every other value makes it up to seven times as much.
    """
    replays = Problem.of(profile).replay
    sizes = [replays.value_bytes[value] for value in replays.value_of]
    part_of: list[int] = []
    held: list[set[int]] = []
    """Per value: the values that its replay holds, itself included."""
    for value, replay in enumerate(replays.replays):
        sources = [source for source in (replay.inputs if replay else ()) if source < value]
        holds = [
            {value}.union(*(held[source] if part_of[source] == part else {source} for source in sources))
            for part in range(parts)
        ]
        bytes_held = [sum(sizes[other] for other in together) for together in holds]
        part = bytes_held.index(min(bytes_held))
        part_of.append(part)
        held.append(holds[part])
    return part_of


def instructions_for(profile: Profile, decisions: list[Decision]) -> Instructions:
    """Instructions with these decisions about the saved values, in the order of first packs: swapped values leave when
    they are saved, and all come back when they are first used. Recording is always on.
    """
    saves = saved_values(profile)
    position = {value: index for index, value in enumerate(saves)}
    values = tuple(
        PlannedValue(
            name=profile.values[number].name,
            layer=profile.values[number].layer,
            decision=decision,
            size_bytes=profile.values[number].size_bytes,
            dtype=profile.values[number].dtype,
            shape=profile.values[number].shape,
        )
        for number, decision in zip(saves, decisions, strict=True)
    )
    swapped = [index for index, decision in enumerate(decisions) if decision is Decision.SWAP]
    return Instructions(
        record_from_start=bool(values),
        values=values,
        handles=tuple(position[handle.value] for handle in profile.handles),
        uses=tuple(point.handle for point in profile.points if point.kind is PointKind.USE),
        schedule=tuple(PointActions(at="save", index=index, swap_out=(index,), release=(index,)) for index in swapped),
    )


def keeping(profile: Profile) -> Instructions:
    """Those that keep every value."""
    instructions = instructions_for(profile, [Decision.KEEP] * len(saved_values(profile)))
    return msgspec.structs.replace(instructions, record_from_start=False)


@contextlib.contextmanager
def under(
    engine: Engine,
    model: torch.nn.Module,
    pack: Callable[[Any], Any],
    unpack: Callable[[Any], Any],
    around_call: AroundCall = lambda _, call: call,
) -> Iterator[None]:
    """The block is one step of the engine. ``pack`` and ``unpack`` are the engine's, or call them. ``around_call``
    returns the callable that replaces a compiled callable.
    """
    hooks = hooks_for(model).deferring((pack, unpack), engine.may_wait, engine.device.kind)
    with around_compiled(model, unseen_by(engine.recorder, around_call)), hooked(*hooks):
        engine.begin()
        try:
            yield
        finally:
            engine.end()

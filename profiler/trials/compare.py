"""Verification: every value that could be recomputed is, once, and compared bitwise with what was saved.

What the dispatcher does not see (a kernel that writes through numpy, an operator that draws random numbers without
saying so) shows only here. A value whose replay differs, or changes what was there before the step, or raises, or that
the runtime cannot replay, is marked in the profile with the reason, and no plan recomputes it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from poochplan.errors import PoochError
from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Profile
from poochplan.formats.queries import saved_values
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.opening import model_device, open_device
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.recorder import RecordedOp, StorageRecord
from poochplan.runtime.replays.replay import WRITTEN_SINCE, Leaves, NotReplayable, Recipe
from poochplan.runtime.run_report import FallbackKind
from poochplan.tensors.storages import parts_of as tensor_parts
from poochplan.tensors.storages import static_keys, storage_key
from poochplan.tensors.torch_private import without_modes

from .parts import parts_of
from .plans import instructions_for, under
from .swap_all import HostStore
from .untouched import Untouched, bytes_of

MOST_ROUNDS = 5
MOST_TRIES = 3
"""Steps until one follows the profile."""
DIFFERS = "its replay gave other bits when it was tried"
UNVERIFIED = "its replay could not be verified: steps differ in what they save"


class VerifyingEngine(Engine):
    """Follows instructions that recompute all they may; keeps a copy of each value, compared when its replay is back.

    No replay moves anything in the step: what it changes is put back, and where it raises the value's copy stands in.

    ``store``: where the copies are; None for in memory.
    """

    def __init__(
        self, instructions: Instructions, device: Device, model: torch.nn.Module, store: HostStore | None = None
    ) -> None:
        super().__init__(instructions, device, lambda: static_keys(model, device.kind))
        self.refused: dict[int, str] = {}
        """Why values could not be replayed, by save point."""
        self.differing: set[int] = set()
        """Save points of values whose replay gave other bits."""
        self.verified: set[int] = set()
        """Save points of values whose replay gave the same bits."""
        self.divergence = ""
        """Where and how the step diverged from its own profile; empty while it has not."""
        self._model = model
        self._changed: list[StorageRecord] = []
        """What was there before the step and the replay under way has changed."""
        self._copies: dict[int, Callable[[], torch.UntypedStorage]] = {}
        self._store = store

    def _forget(self, value: SavedValue, record: StorageRecord) -> None:
        assert value.storage is not None
        assert value.index is not None
        with without_modes():  # or recording would meet the storage through the tensors that copy it
            copy = self._copied(value.storage)
        super()._forget(value, record)
        if value.waits_for_replay:
            self._copies[value.index] = copy
        else:
            self.refused[value.index] = self._refusal(value, record)

    def _copied(self, storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage]:
        """A call that gives a copy of what is there now."""
        if self._store is None:
            copy = storage.clone()
            return lambda: copy
        store, offset, size_bytes = self._store, self._store.put(storage), storage.nbytes()
        return lambda: store.get(offset, size_bytes)

    def _replay(self, value: SavedValue) -> list[SavedValue]:
        """One value at a time, so that it is known whose replay it is that fails."""
        return [back for one in _waiting_for(value) if one.waits_for_replay for back in self._replay_one(one)]

    def _replay_one(self, value: SavedValue) -> list[SavedValue]:
        assert value.recipe is not None
        assert value.index is not None
        away = [source for source in value.recipe.values if source.storage is None]
        self._changed = []
        try:
            back = super()._replay(value)
        except (PoochError, MemoryError, torch.OutOfMemoryError):
            raise  # of this machine's memory and disk, not of the replay
        except Exception as error:
            self.refused[value.index] = self._why(error)
            value.came_back(self._copies.pop(value.index)())
            value.home = self.device.compute
            back = [value]
        if self._changed:
            names = ", ".join(map(self._name, self._changed))
            self.refused[value.index] = f"replaying it would write {names} once more, which no operator declares"
        for found in back:
            if found.storage is not None and found.index is not None and found.index in self._copies:
                self._compare(found.index, found.storage)
        for source in away:
            if source.decision is Decision.SWAP:
                self._release(source)  # its own use may be far
        return back

    def _run_ops(
        self, ops: list[RecordedOp], there: Leaves, keep: set[StorageRecord], device_type: str
    ) -> dict[StorageRecord, torch.UntypedStorage]:
        untouched = Untouched(ops, there)
        try:
            return super()._run_ops(ops, there, keep, device_type)
        finally:
            self._changed = untouched.restore()

    def _compare(self, index: int, found: torch.UntypedStorage) -> None:
        wanted = self._copies.pop(index)()
        same = torch.equal(bytes_of(wanted), bytes_of(found))
        if not same:
            found.copy_(wanted)  # or what is replayed from it would differ too
        if index not in self.refused:
            (self.verified if same else self.differing).add(index)

    def _why(self, error: BaseException) -> str:
        """Why a replay raised, or a recipe could not be made, in a person's words."""
        reason = error if isinstance(error, NotReplayable) else error.__context__
        if not isinstance(reason, NotReplayable):
            return f"its replay raised {type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
        if str(reason) != WRITTEN_SINCE or reason.record is None:
            return str(reason)
        return f"replaying it needs {self._name(reason.record)} as it was, and the step writes that after it was read"

    def _refusal(self, value: SavedValue, record: StorageRecord) -> str:
        """Why no recipe could be made for a value."""
        try:
            Recipe(record, value.generation)
        except NotReplayable as reason:
            return self._why(reason)
        raise AssertionError("a value was not let go of although it has a recipe")

    def _name(self, record: StorageRecord) -> str:
        """What the model calls a storage, for the reader of a reason."""
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if any(storage_key(part) == record.key for part in tensor_parts(tensor)):
                return name
        return "an input of the step" if record.birth is None else "an activation"

    def _diverge(self, reason: str, kind: FallbackKind = FallbackKind.DIVERGED) -> None:
        self.divergence = reason
        super()._diverge(reason, kind)


def _waiting_for(value: SavedValue) -> list[SavedValue]:
    """Those of the saved values it is to be replayed from that wait for a replay too, each behind its own; itself last.

    No recursion: in a residual stream they are as many as the network has layers.
    """
    order: dict[SavedValue, None] = {}
    pending = [(value, False)]
    while pending:
        one, its_own_are_done = pending.pop()
        if one in order or one.recipe is None or not one.waits_for_replay:
            continue
        if its_own_are_done:
            order[one] = None
            continue
        pending.append((one, True))
        pending += [(source, False) for source in one.recipe.values]
    return list(order)


def verify(
    profile: Profile,
    model: torch.nn.Module,
    one_step: Callable[[], Any],
    spill_dir: str | Path | None,
) -> Profile:
    """The profile with ``unreplayable`` set on every value whose replay was tried and failed.

    Runs one step; where a replay gives other bits, the earliest such value is marked and a step is run again, since
    later ones may differ only for being replayed from it. Memory is about that of the in-core step, as in the capture;
    of a profile of mode ``swap-all`` two steps try a part of the values each, and memory is about that of swapping.
    A step that does not follow its own profile is tried again, for one that alternates. When none follows it, what no
    step has verified is not recomputed. A note says where they diverge, and one for each reason why values were marked.
    """
    unverified = profile
    where = model_device(model, profile.device.kind)
    parts = 2 if profile.mode == "swap-all" else 1
    divergence = ""
    for remaining in reversed(range(MOST_ROUNDS)):
        verified: set[int] = set()
        trials = _trials(profile, parts)
        for _ in range(MOST_TRIES):
            engines = [_tried(trial, where, model, one_step, spill_dir) for trial in trials]
            divergence = divergence or next((engine.divergence for engine in engines if engine.divergence), "")
            verified = verified.union(*(engine.verified for engine in engines))
            diverged = any(engine.has_diverged for engine in engines)
            if not diverged:
                break
        differing = sorted(index for engine in engines for index in engine.differing)
        refused = {index: reason for engine in engines for index, reason in engine.refused.items()}
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
    """A line for each reason why verification has marked values, but for that no step was like the captured one."""
    names: dict[str, list[str]] = {}
    for before, after in zip(unverified.values, verified.values, strict=True):
        if after.unreplayable not in (before.unreplayable, UNVERIFIED):
            names.setdefault(after.unreplayable, []).append(after.name)
    return [
        f"{those[0]} {f'and {len(those) - 1} more are' if len(those) > 1 else 'is'} kept or swapped, never recomputed: "
        f"{reason}"
        for reason, those in names.items()
    ]


def _tried(
    instructions: Instructions,
    where: torch.device,
    model: torch.nn.Module,
    one_step: Callable[[], Any],
    spill_dir: str | Path | None,
) -> VerifyingEngine:
    """The engine after one step under it."""
    swaps = any(value.decision is Decision.SWAP for value in instructions.values)
    with contextlib.ExitStack() as stack:
        device = open_device(where, spill_dir)
        stack.callback(device.close)
        store = HostStore(where, spill_dir) if swaps else None
        if store is not None:
            stack.callback(store.close)
        engine = VerifyingEngine(instructions, device, model, store)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)
        stack.enter_context(under(engine, model, engine.pack, engine.unpack))
        one_step()
    return engine


def _marked(profile: Profile, reasons: dict[int, str]) -> Profile:
    """``reasons`` by save point."""
    saves = saved_values(profile)
    by_value = {saves[index]: reason for index, reason in reasons.items()}
    values = tuple(
        msgspec.structs.replace(value, unreplayable=by_value[number]) if number in by_value else value
        for number, value in enumerate(profile.values)
    )
    return msgspec.structs.replace(profile, values=values)


def _recomputed(profile: Profile) -> set[int]:
    """Save points of the values that may be recomputed."""
    (trial,) = _trials(profile, 1)
    return {index for index, value in enumerate(trial.values) if value.decision is Decision.RECOMPUTE}


def _trials(profile: Profile, parts: int) -> list[Instructions]:
    """Instructions that together recompute every value that may be, each when it is first used.

    A lone trial keeps all others; of several, each swaps those of the other parts, so that memory stays about that of
    swapping everything.
    """
    saves = saved_values(profile)
    part_of = parts_of(profile, parts) if parts > 1 else [0] * len(saves)
    rest = Decision.SWAP if parts > 1 else Decision.KEEP
    trials = []
    for part in range(parts):
        decisions = []
        for number, its_part in zip(saves, part_of, strict=True):
            value = profile.values[number]
            tried = its_part == part and not value.unreplayable
            decisions.append(Decision.KEEP if value.pinned else Decision.RECOMPUTE if tried else rest)
        trials.append(instructions_for(profile, decisions))
    return trials

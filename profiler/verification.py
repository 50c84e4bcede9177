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
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import PoochError
from ..planner.schema import Decision, Plan
from ..runtime.device import Device
from ..runtime.devices import model_device, open_device
from ..runtime.engine import Engine
from ..runtime.entry import Entry
from ..runtime.recorder import RecordedOp, Slot
from ..runtime.replay import WRITTEN_SINCE, Leaves, NotReplayable, Recipe
from ..runtime.storages import parts_of as tensor_parts
from ..runtime.storages import static_keys, storage_key
from .hosted import HostStore
from .schema import Profile
from .tables import saved_values
from .trial import plan_of_decisions, under
from .untouched import Untouched, bytes_of
from .verification_parts import parts_of

MOST_ROUNDS = 5
MOST_TRIES = 3
"""Steps until one follows the profile."""
DIFFERS = "its replay gave other bits when it was tried"
UNVERIFIED = "its replay could not be verified: steps differ in what they save"


class VerifyingEngine(Engine):
    """Follows a plan that recomputes all it may; keeps a copy of each value and compares when the replay is back.

    No replay moves anything in the step: what it changes is put back, and where it raises the value's copy stands in.

    ``store``: where the copies are; None for in memory.
    """

    def __init__(self, plan: Plan, device: Device, model: torch.nn.Module, store: HostStore | None = None) -> None:
        super().__init__(plan, device, lambda: static_keys(model, device.kind))
        self.refused: dict[int, str] = {}
        """Why values could not be replayed, by save point."""
        self.differing: set[int] = set()
        """Save points of values whose replay gave other bits."""
        self.verified: set[int] = set()
        """Save points of values whose replay gave the same bits."""
        self.parting = ""
        """Where and how the step left its own profile; empty while it has not."""
        self._model = model
        self._changed: list[Slot] = []
        """What was there before the step and the replay under way has changed."""
        self._copies: dict[int, Callable[[], torch.UntypedStorage]] = {}
        self._store = store

    def _forget(self, entry: Entry, slot: Slot) -> None:
        assert entry.storage is not None
        assert entry.index is not None
        with _disable_current_modes():  # or recording would meet the storage through the tensors that copy it
            copy = self._copied(entry.storage)
        super()._forget(entry, slot)
        if entry.waits_for_replay:
            self._copies[entry.index] = copy
        else:
            self.refused[entry.index] = self._refusal(entry, slot)

    def _copied(self, storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage]:
        """A call that gives a copy of what is there now."""
        if self._store is None:
            copy = storage.clone()
            return lambda: copy
        store, offset, size_bytes = self._store, self._store.put(storage), storage.nbytes()
        return lambda: store.get(offset, size_bytes)

    def _replay(self, entry: Entry) -> list[Entry]:
        """One value at a time, so that it is known whose replay it is that fails."""
        return [back for one in _waiting_for(entry) if one.waits_for_replay for back in self._replay_one(one)]

    def _replay_one(self, entry: Entry) -> list[Entry]:
        assert entry.recipe is not None
        assert entry.index is not None
        away = [source for source in entry.recipe.entries if source.storage is None]
        self._changed = []
        try:
            back = super()._replay(entry)
        except (PoochError, MemoryError, torch.OutOfMemoryError):
            raise  # of this machine's memory and disk, not of the replay
        except Exception as error:
            self.refused[entry.index] = self._why(error)
            entry.came_back(self._copies.pop(entry.index)())
            entry.home = self.device.compute
            back = [entry]
        if self._changed:
            names = ", ".join(map(self._name, self._changed))
            self.refused[entry.index] = f"replaying it would write {names} once more, which no operator declares"
        for found in back:
            if found.storage is not None and found.index is not None and found.index in self._copies:
                self._compare(found.index, found.storage)
        for source in away:
            if source.decision is Decision.SWAP:
                self._release(source)  # its own use may be far
        return back

    def _run_ops(
        self, ops: list[RecordedOp], there: Leaves, keep: set[Slot], device_type: str
    ) -> dict[Slot, torch.UntypedStorage]:
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
        if str(reason) != WRITTEN_SINCE or reason.slot is None:
            return str(reason)
        return f"replaying it needs {self._name(reason.slot)} as it was, and the step writes that after it was read"

    def _refusal(self, entry: Entry, slot: Slot) -> str:
        """Why no recipe could be made for a value."""
        try:
            Recipe(slot, entry.generation)
        except NotReplayable as reason:
            return self._why(reason)
        raise AssertionError("a value was not let go of although it has a recipe")

    def _name(self, slot: Slot) -> str:
        """What the model calls a storage, for the reader of a reason."""
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if any(storage_key(part) == slot.key for part in tensor_parts(tensor)):
                return name
        return "an input of the step" if slot.birth is None else "an activation"

    def _go_astray(self, reason: str, what: str = "") -> None:
        self.parting = reason
        super()._go_astray(reason, what)


def _waiting_for(entry: Entry) -> list[Entry]:
    """Those of the saved values it is to be replayed from that wait for a replay too, each behind its own; itself last.

    No recursion: in a residual stream they are as many as the network has layers.
    """
    order: dict[Entry, None] = {}
    pending = [(entry, False)]
    while pending:
        one, its_own_are_done = pending.pop()
        if one in order or one.recipe is None or not one.waits_for_replay:
            continue
        if its_own_are_done:
            order[one] = None
            continue
        pending.append((one, True))
        pending += [(source, False) for source in one.recipe.entries]
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
    step has verified is not recomputed. A note says where steps part, and one for each reason, why values were marked.
    """
    unverified = profile
    parts = 2 if profile.mode == "swap-all" else 1
    parting = ""
    for remaining in reversed(range(MOST_ROUNDS)):
        verified: set[int] = set()
        plans = _try_plans(profile, parts)
        for _ in range(MOST_TRIES):
            engines = [_try_all(plan, model, one_step, spill_dir) for plan in plans]
            parting = parting or next((engine.parting for engine in engines if engine.parting), "")
            verified = verified.union(*(engine.verified for engine in engines))
            left = any(engine.has_left_the_plan for engine in engines)
            if not left:
                break
        differing = sorted(index for engine in engines for index in engine.differing)
        refused = {index: reason for engine in engines for index, reason in engine.refused.items()}
        profile = _marked(profile, refused | dict.fromkeys(differing[: None if remaining == 0 or left else 1], DIFFERS))
        if left:
            profile = _marked(profile, dict.fromkeys(_recomputed(profile) - verified, UNVERIFIED))
        if left or not differing:
            break
    notes = [*profile.notes, *_refusal_notes(unverified, profile)]
    if parting:
        note = f"steps differ in what they save, first at {parting}; a step that is not the captured one "
        notes.append(note + "swaps all from there" + ("; what was not verified is not recomputed" if left else ""))
    return msgspec.structs.replace(profile, notes=tuple(notes))


def _refusal_notes(unverified: Profile, verified: Profile) -> list[str]:
    """A line for each reason why verification has marked values, but for that no step was like the captured one."""
    names: dict[str, list[str]] = {}
    for before, after in zip(unverified.values, verified.values, strict=True):
        if after.unreplayable not in (before.unreplayable, UNVERIFIED):
            names.setdefault(after.unreplayable, []).append(after.name)
    return [
        f"{reason} (a plan keeps or swaps the saved values of which this is so: {len(those)}, first {those[0]})"
        for reason, those in names.items()
    ]


def _try_all(
    plan: Plan, model: torch.nn.Module, one_step: Callable[[], Any], spill_dir: str | Path | None
) -> VerifyingEngine:
    where = model_device(model, plan.device)
    swaps = any(value.decision is Decision.SWAP for value in plan.values)
    with contextlib.ExitStack() as stack:
        device = open_device(where, spill_dir)
        stack.callback(device.close)
        store = HostStore(where, spill_dir) if swaps else None
        if store is not None:
            stack.callback(store.close)
        engine = VerifyingEngine(plan, device, model, store)
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
    (plan,) = _try_plans(profile, 1)
    return {index for index, value in enumerate(plan.values) if value.decision is Decision.RECOMPUTE}


def _try_plans(profile: Profile, parts: int) -> list[Plan]:
    """Plans that together recompute every value that may be, each when it is first used.

    One keeps all others; of several, each swaps those of the other parts, so that memory stays about that of swapping
    everything.
    """
    saves = saved_values(profile)
    part_of = parts_of(profile, parts) if parts > 1 else [0] * len(saves)
    rest = Decision.SWAP if parts > 1 else Decision.KEEP
    plans = []
    for part in range(parts):
        decisions = []
        for number, its_part in zip(saves, part_of, strict=True):
            value = profile.values[number]
            tried = its_part == part and not value.unreplayable
            decisions.append(Decision.KEEP if value.pinned else Decision.RECOMPUTE if tried else rest)
        plans.append(plan_of_decisions(profile, decisions))
    return plans

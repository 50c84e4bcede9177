"""Verification: every value that could be recomputed is, once, and compared bitwise with what was saved.

What the dispatcher does not see (a kernel that writes through numpy, an operator that draws random numbers without
saying so) shows only here. A value whose replay differs, or that the runtime cannot replay, is marked in the profile
with the reason, and no plan recomputes it.
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

from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import saved_values
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.opening import model_device, open_device
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import Entry
from poochplan.runtime.replays.recorder import Slot
from poochplan.runtime.replays.replay import NotReplayable, Recipe
from poochplan.tensors.storages import static_keys

from .parts import parts_of
from .plans import plan_of_decisions, under
from .swap_all import HostStore

MOST_ROUNDS = 5
MOST_TRIES = 3
"""Steps until one follows the profile."""
DIFFERS = "its replay gave other bits when it was tried"
UNVERIFIED = "its replay could not be verified: steps differ in what they save"


class VerifyingEngine(Engine):
    """Follows a plan that recomputes all it may; keeps a copy of each value and compares when the replay is back.

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
            self.refused[entry.index] = _refusal(entry, slot)

    def _copied(self, storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage]:
        """A call that gives a copy of what is there now."""
        if self._store is None:
            copy = storage.clone()
            return lambda: copy
        store, offset, size_bytes = self._store, self._store.put(storage), storage.nbytes()
        return lambda: store.get(offset, size_bytes)

    def _replay(self, entry: Entry) -> None:
        there = {index for index, found in self._entries.items() if found.storage is not None}
        super()._replay(entry)
        for index, found in list(self._entries.items()):
            if found.storage is not None and index in self._copies:
                self._compare(index, found.storage)
            elif index not in there and found.decision is Decision.SWAP:
                self._release(found)  # its own use may be far

    def _compare(self, index: int, found: torch.UntypedStorage) -> None:
        wanted = self._copies.pop(index)()
        if torch.equal(_bytes(wanted), _bytes(found)):
            self.verified.add(index)
        else:
            self.differing.add(index)
            found.copy_(wanted)  # or what is replayed from it would differ too

    def _go_astray(self, reason: str, what: str = "") -> None:
        self.parting = reason
        super()._go_astray(reason, what)


def _refusal(entry: Entry, slot: Slot) -> str:
    """Why no recipe could be made for a value."""
    try:
        Recipe(slot, entry.generation)
    except NotReplayable as reason:
        return str(reason)
    raise AssertionError("a value was not let go of although it has a recipe")


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
    step has verified is not recomputed. A note says where steps part.
    """
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
    if not parting:
        return profile
    note = (
        f"steps differ in what they save, first at {parting}; a step that is not the captured one swaps all from there"
    )
    notes = (*profile.notes, note + ("; what was not verified is not recomputed" if left else ""))
    return msgspec.structs.replace(profile, notes=notes)


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


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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

"""Verification: every value that could be recomputed is, once, and compared bitwise with what was saved.

What the dispatcher does not see (a kernel that writes through numpy, an operator that draws random numbers without
saying so) shows only here. A value whose replay differs, or that the runtime cannot replay, is marked in the profile
with the reason, and no plan recomputes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..planner.schema import Decision, Plan, PlannedValue, Prediction, Solve
from ..runtime.device import Device
from ..runtime.devices import model_device, open_device
from ..runtime.engine import Engine
from ..runtime.entry import Entry
from ..runtime.modes import around_compiled, uncompiled_hooks
from ..runtime.recorder import Slot
from ..runtime.replay import NotReplayable, Recipe
from ..runtime.storages import static_keys
from .schema import PointKind, Profile

MOST_ROUNDS = 5
MOST_TRIES = 3
"""Steps until one follows the profile."""
DIFFERS = "its replay gave other bits when it was tried"
UNVERIFIED = "its replay could not be verified: steps differ in what they save"


class VerifyingEngine(Engine):
    """Follows a plan that recomputes all it may; keeps a copy of each value and compares when the replay is back."""

    def __init__(self, plan: Plan, device: Device, model: torch.nn.Module) -> None:
        super().__init__(plan, device, lambda: static_keys(model, device.kind))
        self.refused: dict[int, str] = {}
        """Why values could not be replayed, by save point."""
        self.differing: set[int] = set()
        """Save points of values whose replay gave other bits."""
        self.verified: set[int] = set()
        """Save points of values whose replay gave the same bits."""
        self.parting = ""
        """Where and how the step left its own profile; empty while it has not."""
        self._copies: dict[int, torch.UntypedStorage] = {}

    def _forget(self, entry: Entry, slot: Slot) -> None:
        assert entry.storage is not None
        assert entry.index is not None
        with _disable_current_modes():  # or recording would meet the storage through the tensors that copy it
            copy = entry.storage.clone()
        super()._forget(entry, slot)
        if entry.waits_for_replay:
            self._copies[entry.index] = copy
        else:
            self.refused[entry.index] = _refusal(entry, slot)

    def _replay(self, entry: Entry) -> None:
        super()._replay(entry)
        for index, found in list(self._entries.items()):
            if found.storage is not None and index in self._copies:
                self._compare(index, found.storage)

    def _compare(self, index: int, found: torch.UntypedStorage) -> None:
        wanted = self._copies.pop(index)
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
    later ones may differ only for being replayed from it. Memory is about that of the in-core step, as in the capture.
    A step that does not follow its own profile is tried again, for one that alternates. When none follows it, what no
    step has verified is not recomputed. A note says where steps part.
    """
    parting = ""
    for remaining in reversed(range(MOST_ROUNDS)):
        verified: set[int] = set()
        for _ in range(MOST_TRIES):
            engine = _try_all(profile, model, one_step, spill_dir)
            parting = parting or engine.parting
            verified |= engine.verified
            if not engine.has_left_the_plan:
                break
        left = engine.has_left_the_plan
        differing = sorted(engine.differing)[: None if remaining == 0 or left else 1]
        profile = _marked(profile, engine.refused | dict.fromkeys(differing, DIFFERS))
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
    profile: Profile, model: torch.nn.Module, one_step: Callable[[], Any], spill_dir: str | Path | None
) -> VerifyingEngine:
    device = open_device(model_device(model, profile.device.kind), spill_dir)
    engine = VerifyingEngine(_recompute_all(profile), device, model)
    try:
        with (
            warnings.catch_warnings(),
            around_compiled(model, lambda _, call: _quietly(engine, call)),
            uncompiled_hooks(engine.pack, engine.unpack),
        ):
            warnings.simplefilter("ignore", RuntimeWarning)
            engine.begin_step()
            one_step()
    finally:
        engine.end_step()
        device.close()
    return engine


def _marked(profile: Profile, reasons: dict[int, str]) -> Profile:
    """``reasons`` by save point."""
    saves = [profile.handles[point.handle].value for point in profile.points if point.kind is PointKind.SAVE]
    by_value = {saves[index]: reason for index, reason in reasons.items()}
    values = tuple(
        msgspec.structs.replace(value, unreplayable=by_value[number]) if number in by_value else value
        for number, value in enumerate(profile.values)
    )
    return msgspec.structs.replace(profile, values=values)


def _quietly(engine: Engine, call: Callable[..., Any]) -> Callable[..., Any]:
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with engine.recorder.away():
            return call(*args, **kwargs)

    return quiet


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _recomputed(profile: Profile) -> set[int]:
    """Save points of the values that :func:`_recompute_all` recomputes."""
    planned = _recompute_all(profile).values
    return {index for index, value in enumerate(planned) if value.decision is Decision.RECOMPUTE}


def _recompute_all(profile: Profile) -> Plan:
    """A plan that recomputes every value that may be, each when it is first used."""
    saves = [profile.handles[point.handle].value for point in profile.points if point.kind is PointKind.SAVE]
    position = {value: index for index, value in enumerate(saves)}
    planned = []
    for number in saves:
        value = profile.values[number]
        free = not value.pinned and not value.unreplayable
        planned.append(
            PlannedValue(
                name=value.name,
                layer=value.layer,
                decision=Decision.RECOMPUTE if free else Decision.KEEP,
                size_bytes=value.size_bytes,
                dtype=value.dtype,
                shape=value.shape,
            )
        )
    peak_bytes, step_s = profile.in_core_peak_bytes, profile.times.step_s
    return Plan(
        workload=profile.workload,
        profile_fingerprint=profile.ops_fingerprint,
        budget_bytes=peak_bytes,
        device=profile.device.kind,
        solve=Solve(
            policy="recompute all",
            solver="none",
            status="not needed",
            objective_s=None,
            bound_s=None,
            gap=None,
            wall_s=0.0,
            rounds=0,
        ),
        prediction=Prediction(
            peak_bytes=peak_bytes,
            first_step_peak_bytes=peak_bytes,
            in_core_peak_bytes=peak_bytes,
            in_core_step_s=step_s,
            step_s=step_s,
            overhead=0.0,
            stall_s=0.0,
            replay_s=0.0,
            interference_s=0.0,
            out_bytes=0,
            in_bytes=0,
            host_bytes=0,
        ),
        link=profile.link,
        record_from_start=True,
        model=profile.model,
        values=tuple(planned),
        handles=tuple(position[handle.value] for handle in profile.handles),
        uses=tuple(point.handle for point in profile.points if point.kind is PointKind.USE),
        schedule=(),
    )

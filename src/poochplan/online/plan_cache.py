"""Plans of earlier runs, with their profiles: a folder for each kind of segment of each model, by a fingerprint."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType

import torch

from poochplan.errors import PoochError
from poochplan.formats.files import encode_readable, not_kept, package_version, write_cache
from poochplan.formats.plan import SCHEMA_VERSION as PLAN_VERSION
from poochplan.formats.plan import Plan
from poochplan.formats.profile import SCHEMA_VERSION as PROFILE_VERSION
from poochplan.formats.profile import Link, Profile
from poochplan.planner.planning import NO_EVALUATOR
from poochplan.planner.simulator.evaluator import EVALUATOR
from poochplan.profiler.assembly.assemble import this_machine
from poochplan.profiler.live.step_kinds import Key
from poochplan.runtime.applying import model_signature
from poochplan.runtime.arena.step_arena import ArenaMode
from poochplan.runtime.metering.allocated import step_scope
from poochplan.runtime.metering.census import live
from poochplan.runtime.replays.compiled_tape import serves
from poochplan.torch_private.compiler_internals import compiled_with

from .before_plan import ranks_here

VERSION = 2
"""Version of how loops are profiled and planned. Entries of other versions are made anew."""
MOST_KEPT = 2
"""Number of entries for one fingerprint: steps may differ in facts that it lacks."""
LONGEST_REFUSED_S = 24 * 3600.0
"""A profile without a plan is measured anew after this: perhaps no plan fits because the profile is wrong."""
MOST_CALLS = 100
"""At most this many functions, with what they hold, are examined for one replaced forward."""


class PlanCache:
    """A wrong or missing entry is no error: the segment is profiled and planned anew.

    A fingerprint covers everything known before the first step that can change a step or its plan:

    * the code that defines the model's classes, and the program (a plan's replays were tried with that code);
    * the model: its tensors, flags, compiled and wrapped calls;
    * the kind of segment, with torch's switches when it begins;
    * device, threads, host, its ranks, budget, arena, a given link or throttle, whether the allocator counts the memory
      inside ops, whether gradients are scaled, and whether the compiled tape records, which costs less;
    * the classes of the model's optimizers, and which of their settings are not zero: they decide about their state;
    * the versions of torch and of poochplan.

    An entry that still does not fit is left and not deleted: another run may need it.
    """

    def __init__(
        self,
        folder: Path,
        model: torch.nn.Module,
        where: torch.device,
        budget: str | int | float,
        arena: ArenaMode,
        *given: Link | float | str | None,
    ) -> None:
        self._folder, self._where, self._given = folder, where, given
        self._whole, self._model = model, model_signature(model)
        self._digests = self._model.fingerprint, code_digest(model), switches_digest(model)
        self.budget, self._arena = budget, arena
        self._at: dict[Key, Path] = {}
        """The folder in which entries of a kind are found and stored."""
        self._left: set[Path] = set()

    @functools.cached_property
    def _process(self) -> tuple[object, ...]:
        """The process when the first segment begins: by then all modules that the loop uses are loaded."""
        machine, tells = this_machine(self._where), self._where.type == "cpu" and step_scope() is not None
        return (
            *(machine.kind, machine.name, machine.memory_bytes, machine.threads, platform.node(), tells),
            *(ranks_here(), optimizers_of(self._whole)),
            *(scales_gradients(), torch.__version__, package_version(), PROFILE_VERSION, PLAN_VERSION, VERSION),
            serves(self._where.type),
        )

    def find(self, key: Key) -> tuple[Profile, Plan | None] | None:
        """Profile and plan for a kind of segment. The profile alone if the loop ended before its plan was made, or if
        no plan fitted.
        """
        kept = (one for one in self._folders(key) if _kept_at(one))
        for folder in sorted(kept, key=_kept_at, reverse=True):  # the one that matched last comes first
            with contextlib.suppress(PoochError):
                profile = Profile.load(folder / "profile.json")
                plan = self._plan_of(folder, profile)
                is_new = plan is not None or time.time() - _kept_at(folder) < LONGEST_REFUSED_S
                is_same = (profile.model, profile.inputs) == (self._model, key.inputs)
                if is_new and is_same and folder not in self._left:
                    self._at[key] = folder
                    return profile, plan
        return None

    def _plan_of(self, folder: Path, profile: Profile) -> Plan | None:
        with contextlib.suppress(PoochError):
            if (folder / "plan.json").exists():
                plan = Plan.load(folder / "plan.json")
                if NO_EVALUATOR in plan.notes and EVALUATOR.is_built():  # a better plan is found now
                    return None
                if (plan.model, plan.profile_fingerprint) == (self._model, profile.ops_fingerprint):
                    return plan
        return None

    def keep(self, key: Key, profile: Profile, plan: Plan | None = None) -> str:
        """Writes both, the plan last, so that every plan that is found has its profile. Returns a line for the user if
        that is impossible.
        """
        if key not in self._at:
            self._at[key] = min(self._folders(key), key=_kept_at)  # an empty one, else that of the oldest match
        folder = self._at[key]
        with contextlib.suppress(OSError):
            (folder / "plan.json").unlink(missing_ok=True)
        why = write_cache(folder / "profile.json", encode_readable(profile))
        if plan is not None and not why:
            why = write_cache(folder / "plan.json", encode_readable(plan))
        return not_kept(self._folder, why)

    def leave(self, key: Key) -> None:
        """The entry for that kind does not match its segments in this run. The next entry is stored in another
        place.
        """
        folder = self._at.pop(key, None)
        if folder is not None:
            self._left.add(folder)

    def was_right(self, key: Key) -> None:
        """The plan of that entry was followed to the end. The next run tries it first."""
        if key in self._at:
            with contextlib.suppress(OSError):
                os.utime(self._at[key] / "profile.json")

    def _folders(self, key: Key) -> list[Path]:
        text = "\n".join(map(str, (*self._digests, repr(self.budget), self._arena, *self._given, *self._process, *key)))
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [self._folder / (name if number == 0 else f"{name}-{number}") for number in range(MOST_KEPT)]


def _kept_at(folder: Path) -> float:
    """When an entry was stored there or last matched; 0 for an empty folder."""
    with contextlib.suppress(OSError):
        return (folder / "profile.json").stat().st_mtime
    return 0.0


def optimizers_of(model: torch.nn.Module) -> list[str]:
    """Their classes, and which numbers among their settings are not zero, such as a momentum. A schedule may begin with
    a learning rate of zero.
    """
    found, own = set[str](), set(map(id, model.parameters()))
    for optimizer in live(torch.optim.Optimizer):
        for group in optimizer.param_groups:
            if any(id(parameter) in own for parameter in group["params"]):
                settings = (name for name, one in group.items() if isinstance(one, int | float) and one)
                counting = sorted(name for name in settings if not name.endswith("lr"))
                found.add(f"{type(optimizer).__qualname__} {counting}")
    return sorted(found)


def scales_gradients() -> bool:
    """Whether a gradient scaler exists that is switched on."""
    return any(one.is_enabled() for one in live(torch.amp.GradScaler))


def code_digest(model: torch.nn.Module) -> str:
    """Digest of the files that define the classes of the model's modules, and of the program itself."""
    names = sorted({type(module).__module__ for module in model.modules()} | {"__main__"})
    digest = hashlib.sha256()
    for name in names:
        path = getattr(sys.modules.get(name), "__file__", None)
        with contextlib.suppress(OSError):
            digest.update(Path(path).read_bytes() if path else name.encode())
    return digest.hexdigest()[:16]


def switches_digest(model: torch.nn.Module) -> str:
    """Digest of settings that change steps and are no code: plain attributes of modules and of their ``config``, such
    as gradient checkpointing or a probability; replaced and compiled calls, and autocast that wraps them.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        own = vars(module)
        config = own.get("config")
        flags = [*_plain(own), *_plain(vars(config) if hasattr(config, "__dict__") else {}), _told_by(module)]
        digest.update(repr((name, type(module).__qualname__, flags, _calls(own.get("forward")))).encode())
        digest.update(compiled_with(module).encode())
    return digest.hexdigest()[:16]


def _told_by(module: torch.nn.Module) -> str:
    """What the module tells of itself, by code of its author."""
    with contextlib.suppress(Exception):
        return module.extra_repr()
    return ""


def _plain(attributes: Mapping[str, object]) -> list[tuple[str, str]]:
    """Plain attributes by name, without modes and without numbers by which libraries distinguish their objects."""
    kinds = (bool, float, str, torch.dtype)
    return sorted(
        (name, repr(one))
        for name, one in attributes.items()
        if name != "training" and (isinstance(one, kinds) or (isinstance(one, int) and not name.startswith("_")))
    )


def _calls(forward: object) -> list[str]:
    """The functions through which a replaced forward goes, by name, and autocast with its settings."""
    found: list[str] = []
    pending, seen = [forward], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen or len(seen) > MOST_CALLS:
            continue
        seen.add(id(one))
        if isinstance(one, torch.amp.autocast_mode.autocast):
            found.append(f"autocast {one.device} {one.fast_dtype} {one._enabled}")
        elif isinstance(one, MethodType):
            pending.append(one.__func__)
        elif isinstance(one, FunctionType) or hasattr(one, "__wrapped__"):
            found.append(getattr(one, "__qualname__", type(one).__qualname__))
            pending += [getattr(one, "__wrapped__", None), *_held_by(one)]
    return found


def _held_by(function: object) -> Iterator[object]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a file that is still empty
            yield cell.cell_contents

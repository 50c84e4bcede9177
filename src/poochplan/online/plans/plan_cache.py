"""Plans of earlier runs, with their profiles: a folder for each kind of segment of each model, by a fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
from pathlib import Path

import torch

from poochplan.errors import PoochError
from poochplan.formats.files import encode_readable, write_cache
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.profiler.assembly.assemble import this_machine
from poochplan.profiler.live.lines import Key
from poochplan.runtime.metering.allocated import step_scope
from poochplan.runtime.model_check import model_signature
from poochplan.runtime.serving import ArenaMode
from poochplan.torch_private.compiler_internals import is_compiled

VERSION = 1
"""Of the way that loops are profiled and planned; what another one has kept is made anew."""


class PlanCache:
    """What is wrong or missing there is no error: it is profiled and planned anew.

    A fingerprint is of the code that defines the model's classes and of the program that runs (a plan's replays were
    tried with that code), of model, its switches, inputs, place in the loop, device, threads, host, budget, arena,
    whether the allocator tells what ops take, and the version of torch.
    """

    def __init__(
        self, folder: Path, model: torch.nn.Module, where: torch.device, budget: str | int | float, arena: ArenaMode
    ) -> None:
        self._folder = folder
        machine = this_machine(where)
        self._model = model_signature(model)
        self._common = (
            *(self._model.fingerprint, code_digest(model), switches_digest(model)),
            *(machine.kind, machine.name, machine.memory_bytes, machine.threads, platform.node()),
            *(repr(budget), arena, where.type == "cpu" and step_scope() is not None, torch.__version__, VERSION),
        )

    def find(self, key: Key) -> tuple[Profile, Plan | None] | None:
        """Profile and plan for a kind of segment; the profile alone where the loop ended before its plan was made."""
        folder = self._of(key)
        with contextlib.suppress(PoochError):
            if (folder / "profile.json").exists():
                profile = Profile.load(folder / "profile.json")
                if (profile.model, profile.inputs) == (self._model, key.inputs):
                    return profile, self._plan_of(folder, profile)
        return None

    def _plan_of(self, folder: Path, profile: Profile) -> Plan | None:
        with contextlib.suppress(PoochError):
            if (folder / "plan.json").exists():
                plan = Plan.load(folder / "plan.json")
                if (plan.model, plan.profile_fingerprint) == (self._model, profile.ops_fingerprint):
                    return plan
        return None

    def keep(self, key: Key, profile: Profile, plan: Plan | None = None) -> None:
        """Writes them, the plan last, so that one that is found has its profile."""
        folder = self._of(key)
        write_cache(folder / "profile.json", encode_readable(profile))
        if plan is not None:
            write_cache(folder / "plan.json", encode_readable(plan))

    def drop(self, key: Key) -> None:
        """What is kept for that kind is not right any more."""
        for name in ("plan.json", "profile.json"):
            with contextlib.suppress(OSError):
                (self._of(key) / name).unlink(missing_ok=True)

    def _of(self, key: Key) -> Path:
        text = "\n".join(map(str, (*self._common, *key)))
        return self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]


def code_digest(model: torch.nn.Module) -> str:
    """Of the files that define the classes of the model's modules, and of the program itself."""
    names = sorted({type(module).__module__ for module in model.modules()} | {"__main__"})
    digest = hashlib.sha256()
    for name in names:
        path = getattr(sys.modules.get(name), "__file__", None)
        with contextlib.suppress(OSError):
            digest.update(Path(path).read_bytes() if path else name.encode())
    return digest.hexdigest()[:16]


def switches_digest(model: torch.nn.Module) -> str:
    """Of what changes steps and no code: flags of modules, such as gradient checkpointing; replaced, compiled calls."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        own = vars(module)
        flags = sorted((key, value) for key, value in own.items() if isinstance(value, bool) and key != "training")
        forward = getattr(own.get("forward"), "__qualname__", "")
        digest.update(repr((name, flags, forward, is_compiled(module))).encode())
    return digest.hexdigest()[:16]

"""The compiled tape: records below autograd, keeps recipes and runs replays in C++ (``native/``), as ``tape.py`` does.

It serves wherever it is built: once for each torch and Python, against torch's headers. It sees ops by a dispatch key
that torch does not use. If another library has that key, or parts of the model are compiled (whose guards would see the
key), the tape of Python serves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast

import torch

from poochplan.errors import NativeError
from poochplan.formats.plan import Decision, Instructions, PointActions
from poochplan.guard import Guard, users
from poochplan.native import run_beside
from poochplan.runtime.arena.library import ALLOCATOR, TorchBuild
from poochplan.runtime.devices.accelerator import AcceleratorDevice
from poochplan.runtime.devices.backend import Generator
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.messages import warn_once
from poochplan.tensors.host_memory import available_bytes
from poochplan.tensors.modes import ToggledMode, is_dispatched_plainly
from poochplan.tensors.operators import CUDNN_RNN, Traits, traits
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.attributes import saving_here
from poochplan.torch_private.compiler_internals import compiler_callback
from poochplan.torch_private.hooks import Hooks
from poochplan.torch_private.switches import SwitchesAsRecorded, state_now
from poochplan.torch_private.tensor_internals import (
    WIDENING,
    outside_transforms,
    schema_named,
    take_dispatch_key,
    without_dispatch_key,
)

from .recipes import MODIFIED
from .replay import OFF, Around, Content, NotReplayable, Source, StorageRecord, set_state_of, state_of
from .tape import Recorder, Tape, default_generator

NAME, KEY = "tape", "Fake"
LEAST_BYTES = 4 << 30
"""Of host memory that must be left for a build beside a loop: the compiler takes 1.5 GB."""
QUEUEING = AcceleratorDevice, CudaDevice
"""The devices whose copies ``native/copies.h`` queues."""
IS_WANTED = os.environ.get("POOCH_TAPE") != "python"
"""Whether it may serve; where it is not built, sessions have it built for later ones."""


class TapeBuild(TorchBuild):
    """Builds with Python's headers too."""

    timeout_s = 3600
    """Beside a loop that takes all processors, its low priority has a tenth of one."""

    def __init__(self) -> None:
        without, libraries = "recording and replaying take longer", ("c10", "torch_cpu", "torch_python")
        super().__init__(NAME, Path(__file__).parent / "native", without, libraries)

    def facts(self) -> tuple[str, ...]:
        return *super().facts(), f"{sys.implementation.cache_tag}{sysconfig.get_config_var('ABIFLAGS') or ''}"

    def options(self) -> list[str]:
        options, python = super().options(), Path(sysconfig.get_paths()["include"])
        header = Path(torch.__file__).parent / "include/c10/core/DispatchKey.h"
        if not _key_is_below_modes(header.read_text(encoding="utf-8")):
            raise NativeError(f"expected torch 2.13 or newer for the tape in C++, found {torch.__version__}; update it")
        if not (python / "Python.h").exists():
            raise NativeError(f"expected Python.h in {python}, found none; install Python's headers (python3-dev)")
        return ["-isystem", str(python), *options]

    def module(self) -> ModuleType:
        """The module of Python, which is built if necessary. Raises ``NativeError``."""
        file = str(self.build())
        try:
            spec = importlib.util.spec_from_file_location(NAME, file, loader=ExtensionFileLoader(NAME, file))
            assert spec is not None
            assert spec.loader is not None
            found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        except ImportError as error:
            raise NativeError(f"{file}: cannot be loaded ({error}); remove it, and it is built anew") from None
        return found


def _key_is_below_modes(header: str) -> bool:
    """Whether users' modes see an op before the key does. In older versions it comes before them, or is not there."""
    return 0 < header.find(f"\n  {KEY},") < header.find("\n  Python,")


TAPE = TapeBuild()


@functools.cache
def _module() -> Any:
    """The installed module; None if it cannot be loaded, or another library has the key."""
    try:
        found: Any = TAPE.module()
    except (NativeError, OSError):
        return None
    if not take_dispatch_key(KEY):
        warn_once(f"another library uses torch's dispatch key {KEY}, so {TAPE.without}; run without that library")
        return None
    found.install(_HELPERS)
    return found


def serves(device_type: str) -> bool:
    """Whether sessions on a type of device record on the compiled tape, if no part of their model is compiled."""
    return _may_serve(device_type) and TAPE.is_built() and _module() is not None


def _may_serve(device_type: str) -> bool:
    return IS_WANTED and device_type in ("cpu", "cuda")


def recording(device_type: str, *, has_compiled: bool = False) -> tuple[Tape, Recorder]:
    """A tape and its recorder: the compiled ones if they are there, and no part of the model is compiled; else those of
    Python.
    """
    if not has_compiled and serves(device_type):
        tape = _class_of(_module())(device_type)
        return tape, cast(Recorder, CompiledRecorder(tape))  # the interfaces are the same
    plain = Tape(device_type)
    if not has_compiled and _may_serve(device_type) and not TAPE.is_built():
        plain.at_first_recipe = build_beside
    return plain, Recorder(plain)


def op_clock(running: list[str]) -> Any:
    """What times ops where the compiled tape serves; see ``native/op_clock.h``."""
    return _module().OpClock(running)


def unrecorded() -> contextlib.AbstractContextManager[object]:
    """A block whose ops the compiled tape does not see. A dispatch mode is kept away by other means."""
    return without_dispatch_key(KEY)


@functools.cache
def build_beside() -> None:
    """Has the compiled tape built by another process, for the sessions to come, if there is memory for it: that goes on
    when this one ends. Tells, once, why it cannot be built or was not. Where the same is true of the allocator, that is
    told, and not this.
    """
    if why := TAPE.why_unavailable() or TAPE.last_failure():
        if why != ALLOCATOR.why_unavailable():
            warn_once(TAPE.untold(why))
        return
    if available_bytes() < LEAST_BYTES:
        return
    with contextlib.suppress(RuntimeError):  # with limited address space there is no thread
        threading.Thread(target=_build, name="tape's build", daemon=True).start()


def _build() -> None:
    with contextlib.suppress(OSError):  # the next process tells why it was not built
        run_beside(__name__)


ExpectedSave = tuple[torch.dtype, Sequence[int], int, int, str, Decision | None, PointActions | None]


class PlanToFollow(Protocol):
    """What the compiled tape asks of a plan."""

    @property
    def instructions(self) -> Instructions: ...

    @property
    def at_use(self) -> Sequence[PointActions | None]: ...

    def expected_saves(self) -> Iterable[ExpectedSave]:
        """Of each value its dtype, shape, bytes, last handle and name; its decision, if its save may be noted without
        the engine; and what the plan does there.
        """


_POINTS = weakref.WeakKeyDictionary[PlanToFollow, Any]()


@functools.cache
def _class_of(module: Any) -> Callable[[str], Any]:
    def points_of(plan: PlanToFollow) -> Any:
        found = _POINTS.get(plan)
        if found is None:
            found = _POINTS[plan] = module.PlannedPoints()
            for save in plan.expected_saves():
                found.add_save(*save)
            found.handles = plan.instructions.handles
            for use in zip(plan.instructions.uses, plan.at_use, strict=True):
                found.add_use(*use)
        return found

    class PlannedHooks(module.PlannedHooks):  # type: ignore[misc]  # known once it is built
        def follow(self, segment: object, followed: Callable[[], tuple[PlanToFollow, Any, Any] | None]) -> None:
            """From here on, saves and uses that are as planned pass by them.

            ``followed`` gives the plan, its values that are saved, and those that expect another handle.
            """
            if not self.follows and (found := followed()) is not None:
                plan, *values = found
                super().follow(segment, points_of(plan), *values)

        def before(self, pack: object, unpack: object, guard: Guard | None = None) -> Hooks:
            """What autograd calls in place of the hooks, which get what is not as planned. See ``native/hooks.h``.

            ``guard``: takes errors of ours. It lives as long as the hooks do, which hold it too.
            """
            reference = None if guard is None else weakref.ref(guard)

            def takes(error: BaseException) -> bool:
                alive = reference() if reference is not None else None
                return alive is not None and alive.takes(error)

            own = takes, compiler_callback(), saving_here()
            return self.hook(True, pack, *own), self.hook(False, unpack, *own)

    class CompiledTape(module.Tape):  # type: ignore[misc]  # known once it is built
        """The tape of a session, with the interface of ``Tape``."""

        def __del__(self) -> None:
            self.clear()

        def planned_hooks(self, *of: Any) -> Any:
            """See ``native/planned_hooks.h``."""
            return PlannedHooks(self, *of)

        def copies(self, device: ComputeDevice) -> Any:
            """See ``native/copies.h``; None for a device that queues copies by other means."""
            if not isinstance(device, AcceleratorDevice) or type(device) not in QUEUEING:
                return None
            return module.Copies(device, device.parts, device.memcpy_address)

        def forget(self, is_held: Callable[[], bool] | None = None) -> None:
            super().forget(is_held)

        def replay(
            self, value: Content, resident: Callable[[Content], torch.UntypedStorage], around: Around | None = None
        ) -> list[Content]:
            try:
                replay = module.Replay(self, value, resident, around is None)
            except NotReplayable as reason:
                raise users(RuntimeError(MODIFIED.format(reason))) from None
            with contextlib.nullcontext() if around is None else around(replay.parts()):
                found: list[Content] = replay.run()
            return found

    return CompiledTape


class BelowAutograd(ToggledMode):
    """Switches what sees ops in C++ like a dispatch mode, though it is none: ops reach it by their key."""

    native: Any
    """A compiled tape, or a clock of ops."""

    def switch_on(self) -> None:
        super().switch_on()
        self.native.is_on = self.is_on

    def switch_off(self) -> None:
        super().switch_off()
        self.native.is_on = self.is_on

    def _is_there(self) -> bool:
        return bool(self.native.is_here())

    def _comes(self) -> None:
        self.native.come()

    def _goes(self) -> None:
        self.native.go()


class CompiledRecorder(BelowAutograd):
    """Switches the compiled tape as ``Recorder`` is switched."""

    def __init__(self, tape: Any) -> None:
        super().__init__()
        self.tape = self.native = tape

    @property
    def window(self) -> int:
        """The window of recording that is open, or ``OFF``."""
        return int(self.tape.window) if self.is_on and self.tape.is_on else OFF

    def switch_on(self) -> None:
        """Begins a new window of recording, unless one is open."""
        if not self.is_on:
            self.tape.begin_window(is_dispatched_plainly())
        super().switch_on()

    def switch_off(self) -> None:
        """Ends the window: later writes are not recorded."""
        super().switch_off()
        self.tape.settle()
        self.tape.check()


# -- what the compiled tape asks of Python ----------------------------------------------------------------------------


def _facts(name: str, overload: str) -> tuple[tuple[bool, ...], tuple[int, ...], tuple[int, ...]]:
    func = _op(name, overload)
    facts = traits(func) if func is not None else _opaque(name, overload)
    flags = (facts.pure_view, facts.random, facts.uninitialised, facts.overwriting, facts.trusted, facts.may_write)
    more = facts.makes_alike, facts.convolves, func in WIDENING, facts.name == CUDNN_RNN
    return (*flags, *more), facts.written, facts.statistics


def _op(name: str, overload: str) -> Any:
    space, _, base = name.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, space), base), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def _opaque(name: str, overload: str) -> Traits:
    schema = schema_named(name, overload)
    written = (at for at, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write)
    return Traits(name, False, tuple(written), frozenset(), (), False, True, False, False)


def _generator(given: Generator | None, device_type: str, index: int) -> Generator:
    return given if given is not None else default_generator(device_type, None if index < 0 else index)


def _source(
    record: StorageRecord, generation: int, geometry: tuple[Any, ...], probe: torch.Tensor, version: int
) -> Source:
    return Source(record, generation, Geometry(*geometry), probe, version)


_HELPERS = SimpleNamespace(
    facts=_facts,
    source=_source,
    switch_state=state_now,
    generator=_generator,
    state_of=state_of,
    set_state_of=set_state_of,
    NotReplayable=NotReplayable,
    outside_transforms=outside_transforms,
    SwitchesAsRecorded=SwitchesAsRecorded,
)


if __name__ == "__main__":
    os.nice(10)  # beside a loop that takes all processors the lowest priority would take an hour
    TAPE.build()

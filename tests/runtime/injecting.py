"""Fault injection: one function of ours raises once, at its n-th call in a phase of a loop; the loop has to go on.

The calls are seen by ``sys.setprofile``: what it raises at a call is raised by the function that is called.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from opcode import opmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan import guard
from poochplan.formats.plan import Plan
from poochplan.online.auto import auto
from poochplan.sessions import apply
from tests.runtime.inference.passes import Kind
from tests.runtime.nets import Case, as_bytes

OURS = str(Path(poochplan.__file__).parent)
MOMENTS = 1, 2, 50
DOORWAYS = frozenset(
    {
        ("modes.py", "before"),
        ("modes.py", "behind"),
        ("modes.py", "untraced"),
        ("modes.py", "hook"),
        ("tensor_internals.py", "run"),
        ("tensor_internals.py", "_run_backward"),
        ("compiler_internals.py", "run"),
        ("steps.py", "_steps"),
        ("steps.py", "_stepped"),
        ("attributes.py", "packed"),
        ("attributes.py", "unpacked"),
        ("attributes.py", "saved_tensors"),
        ("session.py", "__enter__"),
        ("session.py", "__exit__"),
        ("sessions.py", "made"),
        ("sessions.py", "apply"),
        ("sessions.py", "arena"),
        ("pass_arena.py", "__enter__"),
        ("pass_arena.py", "__exit__"),
        ("pass_arena.py", "close"),
    }
)
"""The functions that torch itself calls, each of which tries what it calls: nothing stands around them."""


class FaultError(Exception):
    """What is raised. No code of ours knows it."""


@dataclass(frozen=True)
class Place:
    """The n-th call of a function in a phase."""

    file: str
    function: str
    phase: str
    call: int

    def __str__(self) -> str:
        return f"{self.file}:{self.function} in {self.phase}, call {self.call}"


@dataclass
class Run:
    """What a loop gave: its bits, the lines that it said, and what it ended with."""

    bits: list[bytes] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    error: str = ""
    was_reached: bool = False
    in_trial: bool = False
    """Whether the fault came in a replay that was tried: the profile notes why it failed, and no plan has it."""

    def why_not(self, plain: Run) -> str:
        """Why it is not as asked: the loop goes on with the bits of the plain one, and one line of ours tells of it."""
        lines = [line for line in self.said if line.startswith("poochplan:")]
        told = lines or self.said  # Python itself tells of what a dying object raises
        if self.error:
            return f"the loop ended by {self.error}"
        if self.bits != plain.bits:
            return "other bits"
        if self.was_reached and len(told) != 1 and not (self.in_trial and not told):
            return f"{len(told)} lines: {told}"
        return ""


class Watch:
    """Counts the calls of our functions, by phase; raises at one. ``phase``: empty while nothing counts.

    ``kind``: of the error. An interrupt comes on the main thread alone.
    """

    def __init__(self, place: Place | None = None, kind: type[BaseException] = FaultError) -> None:
        self.place, self.phase, self.kind = place, "", kind
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.was_reached = self.in_trial = False
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.phase:
            return
        if self.kind is KeyboardInterrupt and threading.current_thread() is not threading.main_thread():
            return
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or not is_entry(frame):
            return
        key = code.co_filename[len(OURS) + 1 :], code.co_qualname, self.phase
        if self.place is None:
            if not is_outermost(code):
                self.calls[key] += 1
            return
        place = self.place
        if key == (place.file, place.function, place.phase) and not self.was_reached:
            with self._lock:
                self.calls[key] += 1
                if self.calls[key] != place.call or self.was_reached:
                    return
                self.was_reached = True
            self.in_trial = any(one.f_code.co_name == "_rebuild_one" for one in callers(frame))
            raise self.kind(f"injected into {place}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_entry(frame: FrameType) -> bool:
    """Whether the call begins the function, and does not resume a generator."""
    return not frame.f_code.co_flags & CO_GENERATOR or frame.f_lasti <= body_begins(frame.f_code)


def body_begins(code: CodeType) -> int:
    """Where the first instruction RESUME is, whose number differs between versions of Python; each takes two bytes."""
    return 2 * code.co_code[::2].index(opmap["RESUME"])


def is_outermost(code: CodeType) -> bool:
    name = Path(code.co_filename).name
    return name == "guard.py" or (name, code.co_name) in DOORWAYS


Loop = Callable[[Watch], list[bytes]]
"""Runs a loop, tells the watch its phases, and returns the bits."""


def run(loop: Loop, place: Place | None = None) -> tuple[Run, Watch]:
    """The loop with a fault at that place; without one the calls are counted. As users run it: nothing is raised that
    can be told.
    """
    watch, found = Watch(place), Run()

    def unraisable(told: Any) -> None:
        found.said.append(f"Python: {told.exc_value}")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setattr(guard, "RAISES", False)
        patch.setattr(sys, "unraisablehook", unraisable)
        patch.setattr(threading, "excepthook", unraisable)
        warnings.simplefilter("always")
        try:
            with watch.watching():
                found.bits = loop(watch)
        except BaseException as error:
            found.error = f"{type(error).__name__}: {error}"
    found.said += [str(one.message) for one in caught if str(one.message).startswith("poochplan:")]
    found.was_reached, found.in_trial = watch.was_reached, watch.in_trial
    return found, watch


def places(watch: Watch) -> list[Place]:
    """Where to raise: of each function that was called in a phase, the first, the second and the fiftieth call."""
    found = sorted(watch.calls.items())
    return [Place(*key, moment) for key, count in found for moment in MOMENTS if moment <= count]


# -- loops -----------------------------------------------------------------------------------------------------------


def steps(watch: Watch, case: Case, count: int, session_of: SessionOf) -> list[bytes]:
    """Bits of that many steps: losses and gradients of each, at last parameters, buffers and the generator."""
    model, step, optimizer = case.fresh()
    torch.manual_seed(1)
    bits: list[bytes] = []
    watch.phase = "making"
    session = session_of(model, optimizer)
    watch.phase = "entering"
    with session:
        for _ in range(count):
            watch.phase = "forward"
            optimizer.zero_grad()
            loss = step()
            watch.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            watch.phase = "between"
            optimizer.step()
            watch.phase = ""
            bits.append(as_bytes(loss.detach()))
            bits += [as_bytes(one.grad) for one in model.parameters() if one.grad is not None]
        watch.phase = "leaving"
    watch.phase = ""
    bits += [as_bytes(one) for one in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    return bits


SessionOf = Callable[[nn.Module, torch.optim.Optimizer], contextlib.AbstractContextManager[Any]]


def plainly(case: Case, count: int) -> Loop:
    return lambda watch: steps(watch, case, count, lambda *_: contextlib.nullcontext())


def planned(case: Case, count: int, plan: Plan, **options: Any) -> Loop:
    return lambda watch: steps(watch, case, count, lambda model, _: apply(plan, model, quiet=True, **options))


def automatic(case: Case, count: int, cache: Path | None, budget: str = "70%") -> Loop:
    """With a copy of the cache, or an empty one."""

    def loop(watch: Watch) -> list[bytes]:
        with tempfile.TemporaryDirectory(prefix="pooch-injecting-") as folder:
            if cache is not None:
                shutil.copytree(cache, folder, dirs_exist_ok=True)

            def session_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
                return auto(model, optimizer, budget=budget, cache=folder, quiet=True, time_limit_s=1)

            return steps(watch, case, count, session_of)

    return loop


def passes(kind: Kind, count: int, arena_of: Callable[[nn.Module], contextlib.AbstractContextManager[Any]]) -> Loop:
    """Calls of a model without gradients."""

    def loop(watch: Watch) -> list[bytes]:
        model, batch = kind.fresh()
        bits: list[bytes] = []
        watch.phase = "making"
        made = arena_of(model)
        watch.phase = "pass"
        with made, torch.no_grad():
            for number in range(count):
                found = model(batch + number)
                watch.phase = ""
                bits.append(as_bytes(found))
                watch.phase = "pass"
            watch.phase = "leaving"
        watch.phase = ""
        return bits

    return loop


def filled_cache(case: Case, folder: Path, budget: str) -> None:
    """Trains until there is a plan, which the next session follows at once."""
    model, step, optimizer = case.fresh()
    with poochplan.auto(model, optimizer, budget=budget, cache=folder, quiet=True, time_limit_s=1) as session:
        for number in range(40):
            optimizer.zero_grad()
            step().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number > 8 and session.wait_until_planned(60):
                return
    raise AssertionError("no plan")

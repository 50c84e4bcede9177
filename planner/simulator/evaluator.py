"""The simulator, compiled: what decisions give, as ``try_style`` says, to the bit, in a fraction of a millisecond."""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np

from poochplan.errors import NativeError
from poochplan.formats.occupancy import Bytes, Ints
from poochplan.formats.plan import Decision
from poochplan.native.native_build import NativeBuild
from poochplan.planner.simulator.flat_problem import FlatProblem, flat_problem_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Style
from poochplan.planner.simulator.simulate import ON_DEMAND, STYLES, try_style

EVALUATOR: Final = NativeBuild(
    "evaluator", Path(__file__).parent / "native", ("-std=c++17", "-ffp-contract=off")
)  # sums in the order in which they are written
_HANDLE, _INT64 = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "evaluator_new": (_HANDLE, (_HANDLE, _INT64)),
    "evaluator_drop": (None, (_HANDLE,)),
    "evaluate": (None, (_HANDLE, _HANDLE, _INT64, _INT64, _HANDLE, _HANDLE)),
    "memory": (None, (_HANDLE, _HANDLE)),
    "first_fit": (None, (_HANDLE, _HANDLE, _INT64, _HANDLE)),
    "place_all": (_INT64, (_HANDLE, _INT64, _HANDLE, _INT64, _HANDLE, _INT64, _HANDLE)),
}
"""Result and arguments of each function of ``native/evaluator.cpp``, without the ``pooch_`` of its name there."""


class _Loading:
    """State: the library of this process, once its build has ended; or why there is none."""

    def __init__(self) -> None:
        self.found: Any = None
        self.failure = ""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, wait_s: float | None) -> None:
        """Begins, where that was not done; a library that is built already is there at once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name="evaluator's build")
                try:
                    self._thread.start()
                except RuntimeError as error:  # where address space is limited
                    self.failure = str(error)
                wait_s = None if EVALUATOR.is_built() else wait_s
        if not self.failure:
            self._thread.join(wait_s)

    def _load(self) -> None:
        try:
            loaded = ctypes.CDLL(str(EVALUATOR.build()))
            functions = {name: getattr(loaded, f"pooch_{name}") for name in _SIGNATURES}
            for name, (result, arguments) in _SIGNATURES.items():
                functions[name].restype, functions[name].argtypes = result, arguments
            self.found = SimpleNamespace(**functions)
        except (NativeError, OSError, AttributeError) as error:
            self.failure = str(error) or repr(error)


_loading = _Loading()


def begin_build() -> None:
    """Has the library built and loaded in the background, where it is not there; nothing is said where it cannot be."""
    library()


def library(wait_s: float | None = 0.0) -> Any:
    """The library's functions, after waiting so long for it (None: however long it takes); None where it is not there.

    It begins to be built at the first call. Arrays go in by their addresses (:func:`address`, :func:`addresses`), and
    other threads run beside what is called.
    """
    if _loading.found is None and not _loading.failure:
        _loading.wait(wait_s)
    return _loading.found


def address(array: np.ndarray[Any, Any]) -> int:
    """Of an array's first element."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def addresses(arrays: Iterable[np.ndarray[Any, Any]]) -> Ints:
    """A struct of ``Rows``: of each array the address and how many rows it has. It keeps none of them alive."""
    return np.array([word for array in arrays for word in (address(array), len(array))], dtype=np.int64)


KEEP: Final = 0
SWAP: Final = 1
RECOMPUTE: Final = 2
DECISIONS: Final = (Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE)
"""The decision of each code."""

STYLE_OF: Final = (*STYLES, ON_DEMAND)
"""The style of each code: all ways to schedule decisions. The last one fits whenever any schedule of them does."""

_CODE_OF: Final = {decision: code for code, decision in enumerate(DECISIONS)}


def codes_of(decisions: Sequence[Decision]) -> Bytes:
    """Decisions as an array that the evaluator takes; int8, (values,)."""
    return np.array([_CODE_OF[decision] for decision in decisions], dtype=np.int8)


def decisions_of(codes: Bytes | bytes) -> tuple[Decision, ...]:
    """The decisions of such an array, or of its bytes."""
    return tuple(DECISIONS[code] for code in bytes(codes))


POOLED: Final = 1 << 20
"""Targets, inputs and ops of merged replays that an evaluator remembers before it forgets them all."""


class Evaluation(NamedTuple):
    """What decisions give in one style."""

    step_s: float
    peak_bytes: int
    moved_bytes: int
    replay_s: float
    """Of the step, what replays take."""


_EVALUATION: Final = struct.Struct("dqqd")
"""``Evaluation`` of the library."""


class Evaluator:
    """Evaluations of one problem, for one thread: by the compiled library as soon as it is there, and before that, or
    where nothing can be compiled, by the simulator in plain Python.
    """

    def __init__(self, problem: Problem, flat: FlatProblem | None = None, pooled: int = POOLED) -> None:
        self.problem = problem
        self.codes = np.zeros(problem.value_count, dtype=np.int8)
        """Decisions as they turned out in the last evaluation: a swap that memory never asked to release is kept."""
        self._flat, self._pooled = flat, pooled
        self.handle: int | None = None
        """By which the library knows it."""
        self._found = bytearray(_EVALUATION.size)
        self._into = address(np.frombuffer(self._found, dtype=np.int8)), address(self.codes)
        self._memory_bytes: Ints | None = None

    def evaluate(self, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Evaluation:
        """What ``try_style`` gives for the same."""
        return self.evaluate_codes(codes_of(wish).tobytes(), budget_bytes, STYLE_OF.index(style))

    def evaluate_codes(self, wish: bytes, budget_bytes: int, style: int) -> Evaluation:
        """The same of codes."""
        native = self._native()
        if native is None:
            found = try_style(self.problem, "", decisions_of(wish), budget_bytes, STYLE_OF[style], recorded=False)
            said = found.simulation
            self.codes[:] = codes_of(found.schedule.decisions)
            self._memory_bytes = said.memory_bytes
            return Evaluation(said.step_s, found.peak_bytes, said.out_bytes + said.in_bytes, said.replay_s)
        self._memory_bytes = None
        native.evaluate(self.handle, wish, budget_bytes, style, *self._into)
        return Evaluation._make(_EVALUATION.unpack(self._found))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Those of ``codes``."""
        return decisions_of(self.codes)

    def memory_bytes(self, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Ints:
        """Most bytes live at each tick, (ticks,): what ``try_style`` gives for the same."""
        self.evaluate(wish, budget_bytes, style)
        if self._memory_bytes is None:
            self._memory_bytes = np.zeros(self.problem.tick_count, dtype=np.int64)
            library().memory(self.handle, address(self._memory_bytes))
        return self._memory_bytes

    def _native(self) -> Any:
        """The library, which then knows this evaluator; None where there is none, or none yet."""
        native = library()
        if native is not None and self.handle is None:
            self._flat = self._flat or flat_problem_of(self.problem)
            arrays = addresses(self._flat)
            self.handle = native.evaluator_new(address(arrays), self._pooled)
            if self.handle is None:
                raise MemoryError("expected memory for an evaluator, found none")
            weakref.finalize(self, native.evaluator_drop, self.handle)
        return native

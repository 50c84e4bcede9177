"""The compiled simulator: it computes the results of ``try_style`` for given decisions, to the bit, in a fraction of a
millisecond.

It reads a problem as flat arrays. Their columns are the fields of structs in ``native/problem.h``, which describes
them. Lists of varying length are in ``lists``; two columns give the position of each.
"""

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
from poochplan.formats.occupancy import Codes, Floats, Ints
from poochplan.formats.plan import Decision
from poochplan.native import NativeBuild, Signatures

from .problem import Problem
from .schedule import Style
from .simulate import ON_DEMAND, STYLES, try_style

EVALUATOR: Final = NativeBuild(
    "evaluator",
    Path(__file__).parent / "native",
    ("-std=c++17", "-ffp-contract=off"),  # sums in the order in which they are written
    "plans are found about a hundred times more slowly",
)
_HANDLE, _INT64 = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: Final[Signatures] = {
    "evaluator_new": (_HANDLE, (_HANDLE, _INT64)),
    "evaluator_drop": (None, (_HANDLE,)),
    "evaluate": (None, (_HANDLE, _HANDLE, _INT64, _INT64, _HANDLE, _HANDLE)),
    "memory": (None, (_HANDLE, _HANDLE)),
    "first_fit": (None, (_HANDLE, _HANDLE, _INT64, _HANDLE)),
    "place_all": (_INT64, (_HANDLE, _INT64, _HANDLE, _INT64, _HANDLE, _INT64, _HANDLE)),
}
"""Result and arguments of each function of ``native/evaluator.cpp``. Its names there begin with ``pooch_``."""


class _Loading:
    """State: the library of this process once its build has ended, or the reason why there is none."""

    def __init__(self) -> None:
        self.found: Any = None
        self.failure = ""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, wait_s: float | None) -> None:
        """Starts the build if necessary, and waits. A library that is already built is available at once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name="evaluator's build")
                try:
                    self._thread.start()
                except RuntimeError as error:  # where address space is limited
                    self.failure = f"the evaluator's build could not begin ({error}); raise the limits of this process"
                wait_s = None if EVALUATOR.is_built() else wait_s
        if not self.failure:
            self._thread.join(wait_s)

    def _load(self) -> None:
        try:
            self.found = SimpleNamespace(**EVALUATOR.load(ctypes.CDLL, _SIGNATURES))
        except (NativeError, OSError) as error:
            self.failure = str(error) or repr(error)


_loading = _Loading()


def begin_build() -> None:
    """Starts to build and load the library in the background if necessary. :func:`untold_absence` says if that has
    failed.
    """
    library()


def untold_absence() -> str:
    """One line for the user if there is no library in this process: why, the cost, what to do. Empty while it is being
    built, and after the first such line.
    """
    return EVALUATOR.untold(_loading.failure)


def library(wait_s: float | None = 0.0) -> Any:
    """The library's functions, after waiting for at most that long (None: without limit); None if there is no library
    yet.

    The first call starts the build. Arrays are passed by address (:func:`address`, :func:`addresses`), and other
    threads run during calls.
    """
    if _loading.found is None and not _loading.failure:
        _loading.wait(wait_s)
    return _loading.found


def address(array: np.ndarray[Any, Any]) -> int:
    """Address of an array's first element."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def addresses(arrays: Iterable[np.ndarray[Any, Any]]) -> Ints:
    """A struct of ``Rows``: address and number of rows of each array. It keeps no array alive."""
    return np.array([word for array in arrays for word in (address(array), len(array))], dtype=np.int64)


KEEP: Final = 0
SWAP: Final = 1
RECOMPUTE: Final = 2
DECISIONS: Final = (Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE)
"""The decision for each code."""

STYLE_OF: Final = (*STYLES, ON_DEMAND)
"""The style for each code: all ways to schedule decisions. The last one fits whenever some schedule of them does."""

_CODE_OF: Final = {decision: code for code, decision in enumerate(DECISIONS)}


def codes_of(decisions: Sequence[Decision]) -> Codes:
    """Decisions as an array that the evaluator takes; int8, (values,)."""
    return np.array([_CODE_OF[decision] for decision in decisions], dtype=np.int8)


def decisions_of(codes: Codes | bytes) -> tuple[Decision, ...]:
    """The decisions in such an array, or in its bytes."""
    return tuple(DECISIONS[code] for code in bytes(codes))


POOLED: Final = 1 << 20
"""Number of targets, inputs and ops of merged replays that an evaluator remembers before it forgets all of them."""


class Evaluation(NamedTuple):
    """The results of decisions in one style."""

    step_s: float
    peak_bytes: int
    moved_bytes: int
    replay_s: float
    """Seconds of replays in the step."""


_EVALUATION: Final = struct.Struct("dqqd")
"""The library's ``Evaluation``."""


class Evaluator:
    """Evaluations of one problem, for one thread. The compiled library computes them once it is available. Before that,
    or if nothing can be compiled, the simulator in plain Python does.
    """

    def __init__(self, problem: Problem, flat: FlatProblem | None = None, pooled: int = POOLED) -> None:
        self.problem = problem
        self.codes = np.zeros(problem.value_count, dtype=np.int8)
        """The resulting decisions of the last evaluation: a swap that memory never requires to be released is kept."""
        self._flat, self._pooled = flat, pooled
        self.handle: int | None = None
        """Identifies this evaluator in the library."""
        self._found = bytearray(_EVALUATION.size)
        self._into = address(np.frombuffer(self._found, dtype=np.int8)), address(self.codes)
        self._memory_bytes: Ints | None = None

    def evaluate(self, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Evaluation:
        """The result of ``try_style`` for the same arguments."""
        return self.evaluate_codes(codes_of(wish).tobytes(), budget_bytes, STYLE_OF.index(style))

    def evaluate_codes(self, wish: bytes, budget_bytes: int, style: int) -> Evaluation:
        """The same, for codes."""
        native = library()
        if native is None:
            found = try_style(self.problem, "", decisions_of(wish), budget_bytes, STYLE_OF[style])
            said = found.simulation
            self.codes[:] = codes_of(found.schedule.decisions)
            self._memory_bytes = said.memory_bytes
            return Evaluation(said.step_s, found.peak_bytes, said.out_bytes + said.in_bytes, said.replay_s)
        if self.handle is None:
            self._flat = self._flat or flat_problem_of(self.problem)  # the library reads it in place
            arrays = addresses(self._flat)
            self.handle = native.evaluator_new(address(arrays), self._pooled)
            if self.handle is None:
                raise MemoryError("planning is out of host memory; free some, or run pooch plan on another machine")
            weakref.finalize(self, native.evaluator_drop, self.handle)
        self._memory_bytes = None
        native.evaluate(self.handle, wish, budget_bytes, style, *self._into)
        return Evaluation._make(_EVALUATION.unpack(self._found))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of ``codes``."""
        return decisions_of(self.codes)

    def memory_bytes(self, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Ints:
        """Most bytes live at each tick, (ticks,), equal to those of ``try_style``."""
        self.evaluate(wish, budget_bytes, style)
        if self._memory_bytes is None:
            self._memory_bytes = np.zeros(self.problem.tick_count, dtype=np.int64)
            library().memory(self.handle, address(self._memory_bytes))
        return self._memory_bytes


class FlatProblem(NamedTuple):
    """One problem; int64 and seconds in float64, (rows, columns)."""

    values: Ints
    copy_s: Floats
    points: Ints
    uses: Ints
    ticks: Ints
    ops: Ints
    op_s: Floats
    lists: Ints
    value_bytes: Ints
    rates: Floats
    facts: Ints


def _added(lists: list[int], items: Iterable[int]) -> tuple[int, int]:
    """Adds a list to what becomes ``FlatProblem.lists``, and returns its beginning and end."""
    begin = len(lists)
    lists.extend(items)
    return begin, len(lists)


def flat_problem_of(problem: Problem) -> FlatProblem:
    """The arrays of a problem; they are copies."""
    lists: list[int] = []
    values, ops = _values(problem, lists), _ops(problem, lists)
    count, link, cost = problem.value_count, problem.link, problem.launch_cost
    never = sorted(
        (replay.ops[-1], value)
        for value, replay in enumerate(problem.replay.replays)
        if replay is not None and problem.first_use_point[value] < 0
    )
    facts = not cost.is_compute, cost.last_save_op, *_added(lists, (value for _, value in reversed(never)))
    op_s = np.zeros((len(ops) + 1, 4))
    op_s[:-1, 0], op_s[:-1, 1] = problem.replay.op_seconds, cost.launch_s
    op_s[:, 2], op_s[:, 3] = cost.before_op_s, problem.work_before_op_s
    of_link = link.duplex, link.interference_out, link.interference_in
    rates = *of_link, cost.out_s, cost.fetch_s, cost.record_s, cost.drop_s, cost.replay_s, problem.step_s
    return FlatProblem(
        values=values,
        copy_s=np.array([(problem.out_seconds(v), problem.in_seconds(v)) for v in range(count)]).reshape(count, 2),
        points=_points(problem),
        uses=_table(problem.use_points, problem.use_ticks),
        ticks=_table(problem.base_bytes, problem.first_step_less_bytes),
        ops=ops,
        op_s=op_s,
        lists=np.array(lists, dtype=np.int64),
        value_bytes=np.array(problem.replay.value_bytes, dtype=np.int64),
        rates=np.array(rates),
        facts=np.array(facts, dtype=np.int64),
    )


def _values(problem: Problem, lists: list[int]) -> Ints:
    count, graph = problem.value_count, problem.replay
    save_tick, numbers = problem.save_tick, np.arange(count)
    frees = np.maximum(save_tick, problem.forward_death + 1)
    by_rank = np.lexsort((numbers, frees))
    early = np.maximum(np.searchsorted(save_tick, problem.forward_death + 1, side="right") - 1, numbers)
    ranges = np.zeros((count, 6), dtype=np.int64)
    for value, replay in enumerate(graph.replays):
        if replay is not None:
            recorded = sorted(graph.recorded_by(value)) if problem.launch_cost.record_s > 0 else []
            ranges[value] = [at for items in (replay.ops, replay.inputs, recorded) for at in _added(lists, items)]
    return _table(
        problem.rounded_bytes,
        problem.size_bytes,
        problem.born,
        problem.forward_death,
        problem.freed,
        problem.save_points,
        problem.first_use_point,
        graph.value_of,
        np.array(problem.save_points)[early],
        frees,
        np.argsort(by_rank),
        by_rank,
        np.random.default_rng(0).integers(0, 2**40, count),
        (value in problem.copies for value in range(count)),
        *ranges.T,
    )


def _points(problem: Problem) -> Ints:
    count = len(problem.point_ticks)
    first_use_of, use = np.full((2, count), -1, dtype=np.int64)
    for value, point in enumerate(problem.first_use_point):
        if point >= 0:
            first_use_of[point] = value
    use[list(problem.use_points)] = np.arange(len(problem.use_points))
    is_save = np.array(problem.point_is_save, dtype=np.int64)
    return _table(problem.point_ticks, problem.point_ops, first_use_of, use, np.cumsum(is_save) - is_save)


def _ops(problem: Problem, lists: list[int]) -> Ints:
    graph, save_op = problem.replay, problem.save_op_array
    numbers = np.arange(len(graph.op_seconds))
    outputs = np.array([_added(lists, outputs) for outputs in graph.op_outputs], dtype=np.int64).reshape(-1, 2)
    temporaries = np.array([_added(lists, values) for values in graph.op_temporaries], dtype=np.int64).reshape(-1, 2)
    on = np.searchsorted(save_op, numbers, side="left") - 1
    off = np.searchsorted(save_op, numbers, side="right")
    return _table(graph.op_workspace_bytes, *outputs.T, *temporaries.T, on, off)


def _table(*columns: Iterable[int] | Ints) -> Ints:
    """The columns, side by side, as one array."""
    arrays = [np.array(c if isinstance(c, np.ndarray) else list(c), dtype=np.int64) for c in columns]
    return np.ascontiguousarray(np.stack(arrays, axis=1))

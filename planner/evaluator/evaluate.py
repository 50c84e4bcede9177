"""What decisions give: seconds of the step, peak bytes and bytes moved, as ``try_style`` says, to the bit."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from poochplan.formats.plan import Decision
from poochplan.planner.judge.candidate import try_style
from poochplan.planner.problem.arrays import Bytes, Ints
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.style import Style

from .codes import STYLE_OF, codes_of, decisions_of, style_code
from .evaluator_library import address, addresses, library
from .layout import Layout, layout_of

POOLED: Final = 1 << 20
"""Targets, inputs and ops of merged replays that an evaluator remembers before it forgets them all."""
_FOUND: Final = np.dtype([("step_s", "f8"), ("replay_s", "f8"), ("peak_bytes", "i8"), ("moved_bytes", "i8")])


class Evaluation(NamedTuple):
    """What decisions give in one style."""

    step_s: float
    peak_bytes: int
    moved_bytes: int
    replay_s: float
    """Of the step, what replays take."""


class Evaluator:
    """Evaluations of one problem, for one thread: by the compiled library as soon as it is there, and before that, or
    where nothing can be compiled, by the simulator in plain Python.
    """

    def __init__(self, problem: Problem, layout: Layout | None = None, pooled: int = POOLED) -> None:
        self.problem = problem
        self.codes = np.zeros(problem.value_count, dtype=np.int8)
        """Decisions as they turned out in the last evaluation: a swap that memory never asked to release is kept."""
        self._layout, self._pooled = layout, pooled
        self.handle: int | None = None
        """By which the library knows it."""
        self._found = np.zeros(1, dtype=_FOUND)
        self._memory_bytes: Ints | None = None

    def evaluate(self, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Evaluation:
        """What ``try_style`` gives for the same."""
        return self.evaluate_codes(codes_of(wish), budget_bytes, style_code(style))

    def evaluate_codes(self, wish: Bytes, budget_bytes: int, style: int) -> Evaluation:
        """The same of codes."""
        native = self.native()
        if native is None:
            found = try_style(self.problem, "", decisions_of(wish), budget_bytes, STYLE_OF[style], recorded=False)
            said = found.simulation
            self.codes[:] = codes_of(found.schedule.decisions)
            self._memory_bytes = said.memory_bytes
            return Evaluation(said.step_s, found.peak_bytes, said.out_bytes + said.in_bytes, said.replay_s)
        self._memory_bytes = None
        native.evaluate(self.handle, address(wish), budget_bytes, style, address(self._found), address(self.codes))
        step_s, replay_s, peak_bytes, moved_bytes = self._found[0].item()
        return Evaluation(step_s, peak_bytes, moved_bytes, replay_s)

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

    def native(self) -> Any:
        """The library, which then knows this evaluator; None where there is none, or none yet."""
        native = library()
        if native is not None and self.handle is None:
            self._layout = self._layout or layout_of(self.problem)
            arrays = addresses(self._layout)
            self.handle = native.evaluator_new(address(arrays), self._pooled)
            if self.handle is None:
                raise MemoryError("expected memory for an evaluator, found none")
            weakref.finalize(self, native.evaluator_drop, self.handle)
        return native

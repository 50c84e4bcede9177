"""The proven lower bound on the step time of every plan: the relaxation BOUND, first as LP, then as MIP.

It is proven for every plan that follows ``docs/semantics.md`` and releases a value, if at all, before its first use.
The argument, row by row, is in ``docs/planner.md``.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from poochplan.formats.occupancy import Floats
from poochplan.formats.plan import Decision
from poochplan.planner.search.allowance import EVALUATIONS_PER_SOLVE, Allowance
from poochplan.planner.search.decide import build_fluid_model
from poochplan.planner.search.fluid import FluidModel, Request
from poochplan.planner.search.memory_constraints import large_values
from poochplan.planner.search.solvers import Cancel, SolverLimits, Warm, proven_bound, solve_linear
from poochplan.planner.simulator.evaluator import DECISIONS
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable

PROOF = 1e-7
"""A ray proves that no plan is left only if the infeasibility that it shows exceeds this share of its own size."""
FEW = 300
"""With more values, BOUND has fewer columns for each: it proves a little less, in a fraction of the time."""
SHORT_WINDOW = 4
"""With more values, this many returns of a value before its own use have a column."""
FREE_SHARE = 0.002
"""With more values, the smallest ones, together this share of the saved bytes, leave and return at no cost."""

MOST_COLUMNS = 10_000
"""With more columns no basis is computed: that takes several times as long as the interior-point solution."""


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The result of the relaxation with some decisions fixed."""

    bound_s: float
    """No plan with these decisions within the budget has a shorter step. Infinite if there is none that takes less than
    all copies and all replays one after another."""
    shares: Floats | None
    """(3, values): the shares kept, swapped and recomputed; None if no solution was found."""


class Relaxation:
    """State: the linear program in the solver, in which the last solve has fixed decisions.

    Two threads may solve two of them at once, because HiGHS releases the interpreter's lock. Two threads may not solve
    the same one.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, cancel: Cancel | None = None, *, is_solved_again: bool = True
    ) -> None:
        self.problem = problem
        self._model = bound_model(problem, budget_bytes)
        arrays = self._model.linear.arrays()
        self._arrays = replace(arrays, low=arrays.low.copy(), high=arrays.high.copy())
        self._free = arrays
        self.is_solved_again = is_solved_again and len(arrays.cost) <= MOST_COLUMNS
        """Whether there is a basis from which to continue."""
        self._warm = Warm(self._arrays, cancel, is_solved_again=self.is_solved_again)

    def solve(self, fixed: Mapping[int, Decision], limits: SolverLimits) -> Relaxed:
        """Solves with the values of ``fixed`` decided and all others free; values that cannot move are ignored.

        ``limits`` counts from now. If it ends the run, the bound is what was proven by then.
        """
        self._fix(fixed)
        is_infeasible, values, duals = self._warm.solve(limits)
        ray = self._warm.ray() if is_infeasible else None
        if ray is not None:
            least, no_cost = PROOF * float(np.abs(ray).max(initial=0.0)), np.zeros_like(self._arrays.cost)
            model = replace(self._arrays, cost=no_cost)
            if max(proven_bound(model, ray), proven_bound(model, -ray)) > least:
                return Relaxed(inf, None)
        bound = None if duals is None else proven_bound(self._arrays, duals)
        shares = None if values is None else self._model.shares(values)
        if shares is not None:
            shares[0] = np.clip(shares[0], 0.0, 1.0)
        return Relaxed(bound_seconds(self._model, bound), shares)

    def _fix(self, fixed: Mapping[int, Decision]) -> None:
        """Fixes the columns of these values, and frees all others again."""
        model, arrays = self._model, self._arrays
        for value, decision in fixed.items():
            if decision is Decision.RECOMPUTE and value in model.swap and value not in model.recompute:
                raise ValueError(f"value {value}: expected one that has a replay, found none; fix another decision")
        for columns, chosen in ((model.swap, Decision.SWAP), (model.recompute, Decision.RECOMPUTE)):
            for value, column in columns.items():
                low, high = float(self._free.low[column]), float(self._free.high[column])
                if value in fixed:
                    low = high = float(fixed[value] is chosen)
                if (low, high) != (arrays.low[column], arrays.high[column]):
                    arrays.low[column], arrays.high[column] = low, high
                    self._warm.highs.changeColBounds(column, low, high)


def bound_model(problem: Problem, budget_bytes: int, *, whole: tuple[int, ...] = ()) -> FluidModel:
    """BOUND, for all values that may move; ``whole`` as in :class:`~.fluid.Request`."""
    candidates = movable(problem)
    request = Request(budget_bytes, tuple(candidates), is_bound=True, whole=whole)
    if len(candidates) > FEW:
        free, _ = smallest_values(problem, [value for value in candidates if value not in whole], FREE_SHARE)
        rest = tuple(value for value in candidates if value not in free)
        request = replace(request, candidates=rest, free=tuple(sorted(free)), window=SHORT_WINDOW)
    return build_fluid_model(problem, request)


def smallest_values(problem: Problem, candidates: Sequence[int], share: float) -> tuple[set[int], int]:
    """The smallest values, together at most this share of the saved bytes; and their bytes with the next one's."""
    sizes, found, held = problem.rounded_bytes.tolist(), set[int](), 0
    most = share * sum(sizes)
    for value in sorted(candidates, key=lambda value: (sizes[value], value)):
        held += sizes[value]
        if held > most:
            break
        found.add(value)
    return found, held


def bound_seconds(model: FluidModel, bound: float | None) -> float:
    """No plan's step is shorter than this, if no objective of the model is below ``bound``."""
    # Above ``longest`` the columns' upper bounds could cut off a plan.
    added = 0.0 if bound is None else min(max(0.0, bound), model.longest)
    return max(model.problem.keep_all_s, model.problem.step_s + added * model.time_unit_s)


DECIDED = 0.98
"""A value whose relaxation decides this share one way needs no branching."""
MOST_BRANCHED = 8
"""At most this many values, the largest, are branched on."""
PINNED = 2
"""The number of the largest of them that distinguish basins."""
LARGE_SHARE = 0.02
"""Only values of at least this share of the saved bytes are branched on."""


@dataclass(frozen=True, eq=False)
class BranchNode:
    """A node with some values decided, and the result of the relaxation for the others."""

    bound_s: float
    fixed: Mapping[int, Decision]
    shares: Floats
    """(3, values): the shares kept, swapped and recomputed."""

    def code_of(self, value: int) -> int:
        """The decision of the value, or that of its largest share if it is undecided."""
        if value in self.fixed:  # if the solver ran out of time, the shares are the parent's
            return DECISIONS.index(self.fixed[value])
        return int(np.argmax(self.shares[:, value]))


@dataclass
class Branching:
    """State: the open nodes, the least bound first."""

    relaxation: Relaxation
    large: tuple[int, ...]
    """Values to branch on, the largest first."""
    bound_s: float = 0.0
    """No plan within the budget has a shorter step, unless one was found that is as short as this."""
    solved: int = 0
    _open: list[tuple[float, int, BranchNode]] = field(default_factory=list)
    _leaves: list[BranchNode] = field(default_factory=list)

    def begin(self, allowance: Allowance) -> None:
        """Solves the root: BOUND with nothing decided."""
        found = self.relaxation.solve({}, allowance.limits())
        self.solved += 1
        self.bound_s = found.bound_s
        if found.shares is not None:
            heapq.heappush(self._open, (found.bound_s, self.solved, BranchNode(found.bound_s, {}, found.shares)))

    def step(self, allowance: Allowance, enough_s: float) -> bool:
        """Branches once; nodes that are not below ``enough_s`` are not examined. Returns whether nodes are left."""
        if not self._open or self._open[0][0] >= enough_s:
            return False
        _, _, node = heapq.heappop(self._open)
        free = (v for v in self.large if v not in node.fixed and node.shares[:, v].max() < DECIDED)
        value = next(free, None)  # the largest one that is not decided
        if value is None:
            self._leaves.append(node)
        else:
            self._branch(node, value, allowance)
        left_s = [bound_s for bound_s, _, _ in self._open[:1]] + [leaf.bound_s for leaf in self._leaves]
        if left_s:  # a leaf's plans may be as short as its bound
            self.bound_s = max(self.bound_s, min(left_s))
        return bool(self._open)

    def basins(self) -> list[dict[int, int]]:
        """Starting points for plans, the least bound first: codes of the largest values, each time different ones."""
        nodes = sorted([*self._leaves, *(node for _, _, node in self._open)], key=lambda node: node.bound_s)
        ways = dict.fromkeys(tuple((value, node.code_of(value)) for value in self.large[:PINNED]) for node in nodes)
        return [dict(way) for way in ways]

    def _branch(self, node: BranchNode, value: int, allowance: Allowance) -> None:
        for decision in DECISIONS:
            if decision is Decision.RECOMPUTE and self.relaxation.problem.replay.replays[value] is None:
                continue
            fixed = {**node.fixed, value: decision}
            found = self.relaxation.solve(fixed, allowance.limits())
            self.solved += 1
            if found.bound_s == inf:
                continue
            child = BranchNode(node.bound_s, fixed, node.shares)
            if found.shares is not None:
                child = BranchNode(max(node.bound_s, found.bound_s), fixed, found.shares)
            heapq.heappush(self._open, (child.bound_s, self.solved, child))


def values_to_branch_on(problem: Problem, movable: Sequence[int]) -> tuple[int, ...]:
    """The few largest of the values that may move, the largest first."""
    size_bytes = problem.rounded_bytes
    least = LARGE_SHARE * float(size_bytes.sum())
    large = [value for value in movable if size_bytes[value] >= least]
    return tuple(sorted(large, key=lambda v: (-int(size_bytes[v]), v))[:MOST_BRANCHED])


INTEGRAL_SHARE = 0.0005
"""Values below this share of the saved bytes stay fractional in the MIP: that only relaxes it."""
INTEGRAL_GAP = 2e-4
"""The MIP stops once it is solved to this share of the step."""
WHOLE_SHARE = 0.02
"""Values of more than this share of the saved bytes move in one piece in the MIP."""
SAFETY = 1e-6
"""Share of the step subtracted from the MIP's dual bound for the solver's tolerances; the LP's needs none."""


def lower_bound(problem: Problem, budget_bytes: int, solver: str, limits: SolverLimits) -> float:
    """Seconds: the bound of the LP for ``budget_bytes``; the step that keeps all if nothing is proven in time.

    The duals are checked, not trusted: see :func:`~.solvers.proven_bound`.
    """
    started_s = time.perf_counter()
    model = bound_model(problem, budget_bytes)
    found = solve_linear(model.linear.arrays(), solver, limits.since(started_s), relaxed=True)
    return bound_seconds(model, found.bound)


def integral_bound(
    problem: Problem, budget_bytes: int, limits: SolverLimits, cancel: Cancel | None = None, *, is_whole: bool = False
) -> float:
    """Seconds: HiGHS's dual bound of the MIP, which lies between the LP's bound and the optimum.

    Copies are fluid; with ``is_whole`` large values move in one piece, which proves more, and more slowly.
    """
    started_s = time.perf_counter()
    large = large_values(problem, movable(problem), WHOLE_SHARE) if is_whole else ()
    model = bound_model(problem, budget_bytes, whole=large)
    small = INTEGRAL_SHARE * model.all_bytes
    for columns in (model.swap, model.recompute):
        for value, column in columns.items():
            if model.resident[value] < small:
                model.linear.is_integer[column] = False
    absolute_gap = INTEGRAL_GAP * problem.step_s / model.time_unit_s
    scaled = replace(limits.since(started_s), gap=INTEGRAL_GAP, absolute_gap=absolute_gap)
    found = solve_linear(model.linear.arrays(), "highs", scaled, cancel=cancel)
    return max(problem.keep_all_s, bound_seconds(model, found.bound) - SAFETY * problem.step_s)


class Proof:
    """State: the best bound proven so far. Any thread may prove, query and end it."""

    def __init__(self, problem: Problem, budget_bytes: int, solver: str) -> None:
        self._problem, self._budget_bytes, self._solver = problem, budget_bytes, solver
        self._cancel, self._lock = Cancel(), threading.Lock()
        self._branching: Branching | None = None
        self._until: Allowance | None = None
        self.bound_s = problem.keep_all_s
        """No plan within the budget has a shorter step, unless one was found that is as short as this."""

    @property
    def is_late(self) -> bool:
        """Whether the MIP still runs although its time is over: HiGHS does not always check the clock."""
        return self._until is not None and self._until.is_spent

    def begin(self, allowance: Allowance) -> None:
        """Proves the bound of the LP."""
        if self._solver != "highs":  # other solvers get the LP, and cannot continue from it
            self._raise_to(lower_bound(self._problem, self._budget_bytes, self._solver, allowance.limits()))
            return
        large = values_to_branch_on(self._problem, movable(self._problem))
        relaxation = Relaxation(self._problem, self._budget_bytes, self._cancel, is_solved_again=bool(large))
        self._branching = Branching(relaxation, large if relaxation.is_solved_again else ())
        self._branching.begin(allowance)
        self._raise_to(self._branching.bound_s)

    def branch(self, allowance: Allowance, solves: int, enough_s: float) -> list[dict[int, int]]:
        """Decides the largest values in each possible way, in about that many LPs, without those ways that are
        known to take ``enough_s``. Returns starting points for plans.
        """
        branching = self._branching
        if branching is None or not branching.large:
            return []
        while branching.solved < solves and not allowance.is_spent and not self._cancel.is_set:
            allowance.spend(EVALUATIONS_PER_SOLVE)
            if not branching.step(allowance, enough_s):
                break
        self._raise_to(min(branching.bound_s, enough_s))
        return branching.basins()

    def integral(self, allowance: Allowance, *, is_whole: bool) -> None:
        """Proves the bound of one of the MIPs; only HiGHS reports one before it is done."""
        if self._solver == "highs" and not self._cancel.is_set:
            self._until = allowance
            limits = allowance.limits()
            self._raise_to(integral_bound(self._problem, self._budget_bytes, limits, self._cancel, is_whole=is_whole))

    def end(self) -> None:
        """Ends the running proof, and all later ones."""
        self._cancel.set()

    def _raise_to(self, bound_s: float) -> None:
        with self._lock:
            self.bound_s = max(self.bound_s, bound_s)

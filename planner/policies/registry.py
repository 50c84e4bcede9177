"""The input and the result of a policy, and the registry of all policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from poochplan.errors import UsageError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Kind, Phase, Profile
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.simulator.evaluator import STYLE_OF, Evaluator
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import ON_DEMAND, Candidate, movable, try_decisions, try_style


@dataclass(frozen=True, eq=False)
class PolicyInput:
    """One step and a budget, and facts about the step that several policies need."""

    problem: Problem
    budget_bytes: int
    allowance: Allowance | None = None
    """The time that a simulating policy may take; without one, its own counts end it."""

    @property
    def profile(self) -> Profile:
        return self.problem.profile

    @property
    def is_over(self) -> bool:
        return self.allowance is not None and self.allowance.is_spent

    @cached_property
    def evaluator(self) -> Evaluator:
        """For policies that simulate often; it returns no schedules."""
        return Evaluator(self.problem)

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """Saved values that may be swapped or recomputed, in the order of their save points."""
        return tuple(value for value in movable(self.problem) if value not in self.problem.copies)

    @cached_property
    def replayable(self) -> frozenset[int]:
        replays = self.problem.replay.replays
        return frozenset(value for value in self.movable if replays[value] is not None)

    @cached_property
    def forward_ops(self) -> tuple[int, ...]:
        return tuple(index for index, op in enumerate(self.profile.ops) if op.phase is Phase.FORWARD)

    @cached_property
    def op_kinds(self) -> tuple[str, ...]:
        """Per op: its operator without namespace, overload and the underscore of in-place (``convolution``, ``add``);
        for a node of autograd its name (``convolutionbackward0``).
        """
        names = (op.name.removeprefix("aten.").removeprefix("autograd.") for op in self.profile.ops)
        return tuple(name.split(".")[0].rstrip("_").lower() for name in names)

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """Per saved value: the op that wrote the saved content; -1 if no op of the step did.

        After ``relu_`` in place, this is ``relu_`` and not the op that created the storage.
        """
        problem = self.problem
        last_writer = dict[int, int]()
        save_ops = {problem.replay.value_of[v]: problem.point_ops[p] for v, p in enumerate(problem.save_points)}
        for index in self.forward_ops:
            op = self.profile.ops[index]
            for value in (*op.outputs, *op.writes):
                if value in save_ops and index < save_ops[value]:
                    last_writer[value] = index
        return tuple(last_writer.get(value, -1) for value in problem.replay.value_of)

    @cached_property
    def differentiable(self) -> frozenset[int]:
        """Forward ops that gradients flow through: they read a parameter, or a floating value of such an op."""
        carrying: set[int] = set()
        found: set[int] = set()
        for index in self.forward_ops:
            op = self.profile.ops[index]
            reads = (self.profile.values[value] for value in op.inputs)
            if carrying.intersection(op.inputs) or any(value.kind is Kind.PARAMETER for value in reads):
                found.add(index)
                carrying.update(v for v in (*op.outputs, *op.writes) if _is_floating(self.profile.values[v].dtype))
        return frozenset(found)

    @cached_property
    def forward_edges(self) -> tuple[tuple[int, int], ...]:
        """The graph of differentiable forward ops: (writer, reader) for each floating value between them."""
        last_writer: dict[int, int] = {}
        edges = []
        for index in self.forward_ops:
            if index not in self.differentiable:
                continue
            op = self.profile.ops[index]
            sources = {last_writer[value] for value in (*op.inputs, *op.writes) if value in last_writer}
            edges += [(source, index) for source in sorted(sources)]
            for value in (*op.outputs, *op.writes):
                if _is_floating(self.profile.values[value].dtype):
                    last_writer[value] = index
        return tuple(edges)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Per op: the length of the longest chain of ops that ends in it.

        The levels of backward ops begin after the deepest forward op, because every gradient depends on the loss.
        """
        level_of_value: dict[int, int] = {}
        levels: list[int] = []
        deepest = 0
        for op in self.profile.ops:
            is_forward = op.phase is Phase.FORWARD
            before = max((level_of_value.get(value, 0) for value in (*op.inputs, *op.writes)), default=0)
            level = 1 + (before if is_forward else max(before, deepest))
            deepest = max(deepest, level) if is_forward else deepest
            level_of_value.update(dict.fromkeys((*op.outputs, *op.writes), level))
            levels.append(level)
        return tuple(levels)

    def away(self, value: int) -> tuple[int, int]:
        """The first tick at which a kept value only waits for its first use, and the tick after the last one."""
        problem = self.problem
        first = max(int(problem.forward_death[value]) + 1, int(problem.save_tick[value]))
        return first, int(min(problem.first_use[value], problem.freed[value] + 1))

    def wish(self, *, swap: Sequence[int] = (), recompute: Sequence[int] = ()) -> tuple[Decision, ...]:
        """Decisions that keep all values but these; values that must be kept are kept anyway."""
        decisions = [Decision.KEEP] * self.problem.value_count
        for decision, values in ((Decision.SWAP, swap), (Decision.RECOMPUTE, recompute)):
            for value in values:
                if not self.problem.must_keep[value]:
                    decisions[value] = decision
        return tuple(decisions)

    def candidate(self, wish: Sequence[Decision]) -> Candidate:
        """These decisions with the best schedule, simulated. The registry sets the name."""
        return try_decisions(self.problem, "", wish, self.budget_bytes, STYLE_OF)

    def rank(self, candidate: Candidate) -> tuple[int, float, int]:
        """Smaller is better; see :meth:`Candidate.rank`."""
        return candidate.rank(self.budget_bytes)

    def fits(self, candidate: Candidate) -> bool:
        """Whether the peak is within the budget, also in the first step."""
        return candidate.peak_bytes <= self.budget_bytes

    def first_that_fits(self, count: int, make: Callable[[int], Candidate]) -> tuple[int, Candidate]:
        """The first of ``count`` plans that fits; the last one if none fits.

        Every plan after a fitting one must fit too: bisection finds it in about ``log2(count)`` calls of ``make``.
        """
        low, high = 0, count - 1
        made: dict[int, Candidate] = {}
        while low < high:
            middle = (low + high) // 2
            made[middle] = make(middle)
            if self.fits(made[middle]):
                high = middle
            else:
                low = middle + 1
        return low, made.get(low) or make(low)

    def fewest_that_fit(self, count: int, wish: Callable[[int], Sequence[Decision]]) -> tuple[Decision, ...]:
        """The first of ``count`` wishes whose schedule on demand fits. Every wish after it must fit too."""
        first, _ = self.first_that_fits(count, lambda n: try_style(self.problem, "", wish(n), 0, ON_DEMAND))
        return tuple(wish(first))


_POLICIES: dict[str, Callable[[PolicyInput], Candidate]] = {}


def policy(name: str) -> Callable[[Callable[[PolicyInput], Candidate]], Callable[[PolicyInput], Candidate]]:
    """Registers a function as the policy ``name``."""

    def register(run: Callable[[PolicyInput], Candidate]) -> Callable[[PolicyInput], Candidate]:
        _POLICIES[name] = run
        return run

    return register


def policy_names() -> tuple[str, ...]:
    """Names that :func:`run_policy` accepts: all policies but the ILP."""
    return tuple(sorted(_POLICIES))


def run_policy(name: str, given: PolicyInput, allowance: Allowance | None = None) -> Candidate:
    """The policy's plan: within the budget if the policy finds one, otherwise the one with the least peak.

    ``allowance`` replaces that of ``given``. Raises ``UsageError`` if there is no policy of that name.
    """
    found = _POLICIES.get(name)
    if found is None:
        raise unknown_policy(name)
    given = given if allowance is None else replace(given, allowance=allowance)
    return replace(found(given), policy=name)


def unknown_policy(name: str) -> UsageError:
    """The error for a name that no policy has."""
    return UsageError(f"policy {name!r} is unknown: expected ilp or one of {', '.join(policy_names())}")


def _is_floating(dtype: str) -> bool:
    return dtype.removeprefix("torch.").startswith(("float", "bfloat", "complex"))

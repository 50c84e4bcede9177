"""The policy ``ilp``: linear programs find starting points and prove a bound, annealing searches from these points, and
the simulator judges the plans.

One thread proves: the relaxation BOUND, branching on the few largest values, then the MIP. The others walk: from
everything swapped, with the largest values pinned as in branching, from PLAN's rounded solution, and again from the
best plan. The search ends when the step is within the wanted gap of the bound. The best plan is polished last: its
schedule is changed where the step waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from poochplan.errors import InfeasibleError, UsageError
from poochplan.formats.occupancy import Codes
from poochplan.formats.plan import Decision, SolveStatus
from poochplan.planner.arena.step_layout import Fitting, Laid
from poochplan.planner.search.allowance import Allowance, Progress, SearchCallback, SearchLimits
from poochplan.planner.search.annealing import Incumbents, Walker
from poochplan.planner.search.bound import Proof, smallest_values
from poochplan.planner.search.decide import solve_fluid
from poochplan.planner.search.fluid import Request
from poochplan.planner.search.memory_constraints import large_values
from poochplan.planner.search.polish import polish, worth_polishing
from poochplan.planner.search.solvers import Cancel, choose_solver
from poochplan.planner.search.walking import Walking, all_decisions, simple_decisions
from poochplan.planner.simulator.evaluator import KEEP, STYLE_OF, codes_of, library
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import Candidate, least_step_s, movable, swap_all_on_demand
from poochplan.units import format_bytes

TINY_SHARE = 0.005
"""Values that together hold less than this share of the saved bytes are kept, where the budget has room for them."""
EXHAUSTIVE = 800
"""If there are at most this many ways to decide, all of them are tried."""
MARGIN = 1.0
"""The part of the budget that PLAN's relaxation does not get, in units of the largest value that may move: whole
buffers need more room than fluid bytes."""
MOST_REPACKS = 4
"""Most repetitions while the bytes that packing adds are not known."""
BUILD_SHARE = 0.5
"""A search waits at most this share of its time limit for the evaluator's build."""
SOLVES = 60
"""Most linear programs that branching solves."""
SMALL = 96
"""With at most this many values, PLAN is also solved with its integrality, and so is BOUND: one thread solves it with
fluid copies, another with large values in one piece."""
WALKS_FIRST = 6
"""The other thread does so after this many walks, once every starting point has had its walk."""
LARGE_SHARE = 0.01
"""Values of more than this share of the saved bytes move in one piece in PLAN with integrality."""
SOLVER_GAP, ABSOLUTE_GAP = 0.005, 5e-4
"""PLAN is solved to this gap, or to this share of the step."""
PROOF_SHARE, BRANCH_SHARE, PLAN_SHARE, PROPOSAL_SHARE = 0.6, 0.15, 0.2, 0.1
"""Shares of the rest that one stage may take."""
POLISH_SHARE = 0.08
"""Share of the allowance that is left to polishing."""
POLISHED = 8
POLISHED_OF_ALL = 30
"""The schedules of this many best plans are polished; of more if all ways to decide were tried."""
POLISH_EVALUATIONS = 500
WATCHED_S = 0.2
"""Seconds between two checks of the search's progress."""


@dataclass(frozen=True)
class Optimum:
    """The chosen plan, and the facts known about it."""

    best: Candidate
    policy: str
    """``ilp``, ``annealing`` if that began at another policy's plan, or the policy that decided alone."""
    notes: tuple[str, ...] = ()
    status: SolveStatus = SolveStatus.NOT_NEEDED
    bound_s: float | None = None
    """No plan within the budget has a shorter step; None if nothing was searched."""
    objective_s: float | None = None
    """Objective of the last PLAN with decisions: with integrality for the budget, else relaxed for less memory."""
    rounds: int = 0
    """Number of linear or integer programs that were solved."""
    solver: str = "none"
    """The solver that proved the bound."""
    evaluations: int | None = None
    seed: int = 0
    tiny: frozenset[int] = frozenset()
    laid: Laid | None = None
    """The layout of the best plan, if it was packed."""


def optimise(
    problem: Problem,
    budget_bytes: int,
    effort: SearchLimits,
    proposals: Sequence[Callable[[Allowance], Candidate]] = (),
    watch: SearchCallback | None = None,
    fitting: Fitting | None = None,
    starts: Sequence[Sequence[Decision]] = (),
) -> Optimum:
    """The plan with the least simulated step that was found; ``proposals`` are other policies whose plans are included,
    and ``starts`` decisions from which walks begin.

    With ``fitting`` its arena fits the budget too, or a note says that no such plan was found. An interrupt ends the
    search; with ``effort.keeps_interrupted`` the best plan so far is returned. Raises ``InfeasibleError`` if no plan
    within the host's memory was found.
    """
    whole = effort.allowance()
    library(None if whole.is_counted else BUILD_SHARE * effort.time_limit_s)
    incumbents = Incumbents(problem, budget_bytes, effort.host_bytes, fitting)
    search = _PlanSearch(incumbents, effort, proposals, whole)
    try:
        search.begin([codes_of(tuple(wish)) for wish in starts])
    except KeyboardInterrupt:
        if not effort.keeps_interrupted or incumbents.step_s == inf:
            raise
        search.stop()
        return search.optimum()
    jobs = search.jobs()
    with ThreadPoolExecutor(len(jobs), "search") as pool:  # threads of its own: an interrupt reaches this one at once
        try:
            search.wait_for([pool.submit(search.work, job) for job in jobs], search.allowance, watch)
            search.wait_for([pool.submit(search.polish)], search.whole, watch)
        except BaseException as error:
            search.stop()
            if not (isinstance(error, KeyboardInterrupt) and effort.keeps_interrupted):
                raise
    return search.optimum()


class _PlanSearch:
    """State: the results and proofs so far, and the next starting points. Its threads share it."""

    def __init__(
        self,
        incumbents: Incumbents,
        effort: SearchLimits,
        proposals: Sequence[Callable[[Allowance], Candidate]],
        whole: Allowance,
    ) -> None:
        self.incumbents, self.effort, self.proposals = incumbents, effort, proposals
        self.problem, self.budget_bytes = problem, budget_bytes = incumbents.problem, incumbents.budget_bytes
        self.solver = choose_solver(effort.solver)
        if effort.evaluations is not None and self.solver != "highs":
            raise UsageError(
                f"solver: expected highs with evaluations, found {self.solver!r}, which only time can stop; "
                "pip install highspy and leave the solver out, or leave evaluations out"
            )
        self.whole, self.allowance = whole, whole.part(1.0 - POLISH_SHARE)
        self.tiny, self.values = frozenset[int](), tuple(movable(problem))
        self.proof = Proof(problem, budget_bytes, self.solver)
        self.walking = Walking(self.values, self.tiny, incumbents, self.allowance, effort.seed)
        self.objective_s: float | None = None
        self.programs_solved = 0
        self.cancel = Cancel()
        self.is_exhausted = False
        self.offered: list[Candidate] = []
        self.is_polished = False

    # -- threads ------------------------------------------------------------------------------------------------------

    def wait_for(self, running: list[Future[None]], allowance: Allowance, watch: SearchCallback | None) -> None:
        """Waits for all threads, or for an error in one. They spend ``allowance``."""
        left = set(running)
        while left:
            done, left = wait(left, timeout=WATCHED_S, return_when=FIRST_EXCEPTION)
            for job in done:
                job.result()
            if watch is not None and self.incumbents.step_s < inf and watch(self.progress()):
                allowance.end()
                self.cancel.set()
                self.proof.end()
            if self.is_good_enough or self.proof.is_late:
                self.proof.end()

    def stop(self) -> None:
        self.whole.stop()
        self.cancel.set()
        self.proof.end()

    def work(self, stages: Sequence[Callable[[], None]]) -> None:
        """The work of one thread: its stages, until the search is over. A bound is proven in any case."""
        for stage in stages:
            if self.is_over and not (self.is_exhausted and stage == self._relax):
                return
            stage()

    def jobs(self) -> list[list[Callable[[], None]]]:
        """The stages of each thread. A single thread runs all of them, in an order that is independent of the clock if
        simulations are counted. With several threads, one proves first and one walks first. If all ways to decide were
        tried, only the proof is left.
        """
        if self.is_exhausted:
            return [[self._relax, self._integrate] if self.effort.threads > 1 else [self._relax]]
        walkers = [self._walker() for _ in range(self.effort.threads)]
        first, by_plan = walkers[0], partial(self._start_from_plan_model, walkers[0])
        walks: list[Callable[[], None]] = [partial(self._walk_on, walker) for walker in walkers]
        if len(walkers) == 1:
            once = partial(self.walking.once, first)
            return [[partial(self._propose, first), self._relax, once, self._branch, by_plan, *walks]]
        prove: list[Callable[[], None]] = [self._relax, self._branch, by_plan]
        walk: list[Callable[[], None]] = [partial(self._propose, walkers[1])]
        if self.is_small:
            prove.append(self._integrate)
            walk.append(partial(self._integrate, walkers[1]))
        return [[*prove, walks[0]], [*walk, walks[1]], *([more] for more in walks[2:])]

    @property
    def is_small(self) -> bool:
        """Whether integer programs give more than their relaxations in the time available."""
        return len(self.values) <= SMALL

    # -- how far it is ------------------------------------------------------------------------------------------------

    def is_enough(self, step_s: float) -> bool:
        """Whether a step of that many seconds is within the wanted gap."""
        bound_s = self.proof.bound_s
        return step_s < inf and (bound_s <= 0 or step_s / bound_s - 1 <= self.effort.gap)

    @property
    def is_good_enough(self) -> bool:
        return self.is_enough(self.incumbents.step_s)

    @property
    def is_over(self) -> bool:
        return self.is_good_enough or self.allowance.is_spent

    def progress(self) -> Progress:
        """The progress for its observer, once there is a plan within the budget."""
        step_s, bound_s = self.incumbents.step_s, self.proof.bound_s
        return Progress(
            step_s=step_s,
            bound_s=bound_s,
            overhead=self.problem.overhead(step_s),
            gap=max(0.0, step_s / bound_s - 1) if bound_s > 0 else 0.0,
            left=max(0.0, self.allowance.left),
            is_counted=self.allowance.is_counted,
        )

    # -- linear programs ----------------------------------------------------------------------------------------------

    def _relax(self) -> None:
        """Solves BOUND with nothing decided."""
        self.proof.begin(self.allowance.part(PROOF_SHARE if self.effort.threads == 1 else 1.0))
        self.programs_solved += 1

    def _branch(self) -> None:
        """Solves BOUND with the largest values decided. A walk starts from each way that may lead to a better plan."""
        basins = self.proof.branch(self.allowance.part(BRANCH_SHARE), SOLVES, self.incumbents.step_s)
        self.programs_solved += 1
        self.walking.look_in(basins)

    def _integrate(self, walker: Walker | None = None) -> None:
        """Solves BOUND with its integrality; with a walker after some walks, and with large values in one piece."""
        while walker is not None and not self.is_over and not self.walking.has_walked(WALKS_FIRST):
            self.walking.once(walker)
        if walker is None or not self.is_over:
            self.proof.integral(self.allowance, is_whole=walker is not None)
            self.programs_solved += 1

    def _start_from_plan_model(self, walker: Walker) -> None:
        """Starting points by PLAN: its relaxation for a budget smaller by the largest buffer, rounded; on small steps
        also PLAN with its integrality, for the whole budget.
        """
        largest = max((int(self.problem.rounded_bytes[value]) for value in self.values), default=0)
        within_bytes = self.incumbents.within_bytes
        request = Request(within_bytes, self.values, host_bytes=self.effort.host_bytes)
        less = replace(request, budget_bytes=int(within_bytes - MARGIN * largest))
        self._solve(walker, less, is_relaxed=True)
        if self.is_small and not self.is_over:
            whole = large_values(self.problem, self.values, LARGE_SHARE)
            self._solve(walker, replace(request, whole=whole), is_relaxed=False)

    def _solve(self, walker: Walker, request: Request, *, is_relaxed: bool) -> None:
        limits = self.allowance.part(PLAN_SHARE).limits(gap=SOLVER_GAP, absolute_gap=ABSOLUTE_GAP * self.problem.step_s)
        codes, objective_s = solve_fluid(
            self.problem, request, self.solver, limits, relaxed=is_relaxed, cancel=self.cancel
        )
        self.programs_solved += 1
        if self.objective_s is None or codes is not None:
            self.objective_s = objective_s
        if codes is None:
            return
        self.walking.descend(walker, walker.try_styles(codes, "ilp"))
        self.walking.look_near(codes)

    # -- walks --------------------------------------------------------------------------------------------------------

    def _walker(self) -> Walker:
        return Walker(self.values, self.incumbents, self.is_enough)

    def begin(self, starts: Sequence[Codes]) -> None:
        """Tries every way to decide if there are few, else simple plans: from here on there is a plan."""
        walker = self._walker()
        keep_all = np.full(self.problem.value_count, KEEP, dtype=np.int8)
        walker.try_styles(keep_all, "keep-all", (0,))  # it fits any host, so there is always a plan
        every_way = all_decisions(self.problem, EXHAUSTIVE)
        if every_way is not None:
            for _ in range(MOST_REPACKS):  # again if packing has reduced the live bytes meanwhile
                within_bytes = self.incumbents.within_bytes
                for wish in every_way:
                    walker.try_styles(codes_of(wish), "ilp", range(len(STYLE_OF)))
                if self.incumbents.within_bytes == within_bytes:
                    break
            self.is_exhausted = True
            return
        for codes in starts:
            walker.try_styles(codes, "ilp", range(len(STYLE_OF)))
        for name, wish in simple_decisions(self.problem):
            walker.try_styles(codes_of(wish), name, range(len(STYLE_OF)))
        self._leave_out_tiny()
        for codes in starts:
            self.walking.look_near(codes)
        self.walking.begin()

    def _leave_out_tiny(self) -> None:
        """Tiny values are kept, if the room that the plans so far have left holds them beside the smallest plan."""
        tiny, held_bytes = smallest_values(self.problem, self.values, TINY_SHARE)
        if held_bytes <= self.incumbents.within_bytes - swap_all_on_demand(self.problem).peak_bytes:
            self.tiny = frozenset(tiny)
            self.values = tuple(value for value in self.values if value not in self.tiny)
            self.walking = Walking(self.values, self.tiny, self.incumbents, self.allowance, self.effort.seed)

    def _propose(self, walker: Walker) -> None:
        """Includes the plans of other policies, so that none of them is better."""
        for propose in self.proposals:
            if self.is_over:
                return
            proposed = propose(self.allowance.part(PROPOSAL_SHARE))
            self._offer(proposed)
            walker.try_styles(codes_of(proposed.wish), proposed.policy, range(len(STYLE_OF)))

    def _walk_on(self, walker: Walker) -> None:
        while not self.is_over and not self.walking.is_over:
            self.walking.once(walker)

    # -- the end ------------------------------------------------------------------------------------------------------

    def polish(self) -> None:
        """Local search over the schedules of the best decisions; over more if all decisions were tried."""
        count, over = (POLISHED_OF_ALL, POLISHED_OF_ALL) if self.is_exhausted else (POLISHED, 0)
        for found in worth_polishing(self.problem, self.incumbents.ranked(), self.budget_bytes, count, over):
            if self.is_good_enough or self.whole.is_spent:
                return
            start = self.incumbents.simulated(found)
            if least_step_s(self.problem, start.wish) < self.incumbents.step_s:
                self._offer(polish(self.problem, start, found.within_bytes, self.whole.part(1.0, POLISH_EVALUATIONS)))
        self.is_polished = not self.whole.is_spent

    def _offer(self, candidate: Candidate) -> None:
        if not self.incumbents.fits(codes_of(candidate.schedule.decisions)):
            return
        if self.incumbents.fitting is None:
            self.offered.append(candidate)
        elif candidate.peak_bytes <= self.budget_bytes and candidate.simulation.step_s < self.incumbents.step_s:
            self.incumbents.fitting.pack(candidate)

    def optimum(self) -> Optimum:
        """The best plan, and the proven bound."""
        fitting = self.incumbents.fitting
        packed = fitting.chosen() if fitting is not None else None
        if packed is not None:
            best = packed.candidate
        else:
            found = self.incumbents.simulated(self.incumbents.best(is_live=True))
            best = min([found, *self.offered], key=lambda candidate: candidate.rank(self.budget_bytes))
        if best.peak_bytes > self.budget_bytes:
            raise InfeasibleError(
                f"no plan was found within {format_bytes(self.budget_bytes)} that swaps at most "
                f"{format_bytes(self.effort.host_bytes or 0)}; pass a larger host budget, or a larger budget",
                smallest_budget_bytes=best.peak_bytes,
            )
        bound_s = self.proof.bound_s
        status = self.whole.status if self.whole.status is SolveStatus.INTERRUPTED else self.allowance.status
        if status is not SolveStatus.INTERRUPTED and self.is_polished and (self.is_exhausted or self.walking.is_over):
            status = SolveStatus.SEARCHED  # nothing was left to try
        if best.simulation.step_s <= bound_s * (1 + self.effort.gap):
            status = SolveStatus.WITHIN_GAP
        policy, origin = best.policy, ""
        if policy != "ilp":
            policy, origin = "annealing", f"its decisions were found by annealing that began at the plan of {policy!r}"
        note = packed.note if packed is not None else self.incumbents.unfit
        return Optimum(
            best=best,
            policy=policy,
            notes=tuple(filter(None, (origin, note))),
            status=status,
            bound_s=bound_s,
            objective_s=self.objective_s,
            rounds=self.programs_solved,
            solver=self.solver,
            evaluations=self.effort.evaluations,
            seed=self.effort.seed,
            tiny=self.tiny,
            laid=packed.laid if packed is not None else None,
        )

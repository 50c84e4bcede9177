"""The fluid model PLAN: decisions are binary, copies flow; docs/planner.md lists its rows.

Events are aggregated to *slots*, the stretches of compute between clock points. A memory row stands at a tick that no
other tick of its slot dominates, and counts exactly the values held at that tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pulp

from .problem import Ints, Problem
from .slots import slots_of

WINDOW_NEEDS = 30
"""How many of the last points that replay something a value may be brought back at before its own use."""
SWAP_PREFERENCE = 1e-4
"""Weight of link time in the objective, so that no value is moved for nothing."""


@dataclass(frozen=True, eq=False)
class FluidModel:
    """The PuLP model and the variables whose values are the decisions."""

    lp: pulp.LpProblem
    swap: dict[int, pulp.LpVariable]
    recompute: dict[int, pulp.LpVariable]
    time_unit_s: float


@dataclass
class _Columns:
    """Variables under construction."""

    lp: pulp.LpProblem
    swap: dict[int, pulp.LpVariable] = field(default_factory=dict)
    recompute: dict[int, pulp.LpVariable] = field(default_factory=dict)
    early: dict[int, list[tuple[int, pulp.LpVariable, pulp.LpVariable]]] = field(default_factory=dict)
    """Per value: (slot, recomputed by then, fetched by then), slots before its own use, ascending."""


def build_fluid_model(
    problem: Problem,
    budget_bytes: int,
    candidates: Iterable[int],
    tightened: dict[int, int] | None = None,
    host_bytes: int | None = None,
) -> FluidModel:
    """The model for ``budget_bytes``; values outside ``candidates`` are kept.

    ``tightened`` maps ticks to bytes that are taken off the budget there; each such tick has its own row.
    """
    return _Builder(problem, budget_bytes, list(candidates), tightened or {}, host_bytes).build()


class _Builder:
    """State: the rows and columns made so far. Bytes are scaled by ``unit`` and seconds by ``time_unit_s``."""

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        candidates: list[int],
        tightened: dict[int, int],
        host_bytes: int | None,
    ) -> None:
        self.problem, self.budget_bytes, self.candidates = problem, budget_bytes, candidates
        self.tightened, self.host_bytes = tightened, host_bytes
        self.slots = slots_of(problem)
        self.unit = max(1.0, float(np.mean(problem.rounded_bytes[candidates])) / 10) if candidates else 1.0
        self.time_unit_s = problem.step_s / 1000 or 1.0
        self.columns = _Columns(pulp.LpProblem("plan", pulp.LpMinimize))
        self.size = {value: float(problem.rounded_bytes[value]) / self.unit for value in range(problem.value_count)}
        first = problem.first_use_point
        self.use_slot = [self.slots.of_point[point] if point >= 0 else self.slots.count for point in first]
        self.save_slot = [self.slots.of_point[point] for point in problem.save_points]
        self.seconds = self.slots.seconds / self.time_unit_s

    def build(self) -> FluidModel:
        self._decisions()
        self._early_replays()
        self._links()
        self._memory()
        self._objective()
        columns = self.columns
        return FluidModel(columns.lp, columns.swap, columns.recompute, self.time_unit_s)

    def _row(self, terms: list[tuple[pulp.LpVariable, float]], sense: int, bound: float) -> None:
        self.columns.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=bound))

    def _decisions(self) -> None:
        columns, replays = self.columns, self.problem.replay.replays
        for value in self.candidates:
            columns.swap[value] = pulp.LpVariable(f"swap_{value}", cat="Binary")
            if replays[value] is not None:
                columns.recompute[value] = pulp.LpVariable(f"recompute_{value}", cat="Binary")
                self._row([(columns.swap[value], 1), (columns.recompute[value], 1)], pulp.LpConstraintLE, 1)
        if self.host_bytes is not None:
            terms = [(swap, self.size[value]) for value, swap in columns.swap.items()]
            self._row(terms, pulp.LpConstraintLE, self.host_bytes / self.unit)

    def _consumers(self) -> dict[int, list[int]]:
        """Per value: the recomputable values whose replay starts from it."""
        consumers: dict[int, list[int]] = {}
        for value in self.columns.recompute:
            replay = self.problem.replay.replays[value]
            assert replay is not None
            for source in replay.inputs:
                consumers.setdefault(source, []).append(value)
        return consumers

    def _early_replays(self) -> None:
        """Rows "what a replay starts from is back by then", for values whose own use comes later."""
        columns = self.columns
        self.consumers = self._consumers()
        order = sorted(self.candidates, key=lambda value: self.use_slot[value])
        for value in order:
            consumers = [user for user in self.consumers.get(value, ()) if self.use_slot[user] < self.use_slot[value]]
            wanted = {self.use_slot[user] for user in consumers}
            for user in consumers:
                wanted.update(slot for slot, _, _ in columns.early.get(user, ()))
            window = sorted(wanted)[-WINDOW_NEEDS:]
            self._early_columns(value, window)
            for user in consumers:
                self._ready_rows(value, user, window)

    def _early_columns(self, value: int, window: list[int]) -> None:
        columns = self.columns
        early: list[tuple[int, pulp.LpVariable, pulp.LpVariable]] = []
        for slot in window:
            replayed = pulp.LpVariable(f"replayed_{value}_{slot}", 0, 1)
            fetched = pulp.LpVariable(f"fetched_{value}_{slot}", 0, 1)
            if value not in columns.recompute:
                replayed.upBound = 0
            if early:
                self._row([(early[-1][1], 1), (replayed, -1)], pulp.LpConstraintLE, 0)
                self._row([(early[-1][2], 1), (fetched, -1)], pulp.LpConstraintLE, 0)
            early.append((slot, replayed, fetched))
        if early and value in columns.recompute:
            self._row([(early[-1][1], 1), (columns.recompute[value], -1)], pulp.LpConstraintLE, 0)
        if early:
            self._row([(early[-1][2], 1), (columns.swap[value], -1)], pulp.LpConstraintLE, 0)
        columns.early[value] = early

    def _ready_rows(self, value: int, user: int, window: list[int]) -> None:
        """Where ``user`` is replayed by a slot, ``value`` is kept, replayed by then, or fetched by then."""
        columns = self.columns
        own = {slot: (replayed, fetched) for slot, replayed, fetched in columns.early[value]}
        done = [(slot, replayed) for slot, replayed, _ in columns.early.get(user, ())]
        done.append((self.use_slot[user], columns.recompute[user]))
        for slot, is_back in done:
            replayed, fetched = own.get(slot, (None, None))
            for needed, early in ((columns.recompute.get(value), replayed), (columns.swap[value], fetched)):
                if needed is not None:
                    terms = [(is_back, 1.0), (needed, 1.0)]
                    if early is not None:
                        terms.append((early, -1.0))
                    self._row(terms, pulp.LpConstraintLE, 1)

    def _link_rate(self, seconds: Sequence[float]) -> float:
        """Scaled bytes per scaled second over all candidates, latencies included."""
        total = sum(seconds)
        return sum(self.size[value] for value in self.candidates) / (total / self.time_unit_s) if total > 0 else 1e9

    def _links(self) -> None:
        """Backlog of bytes not yet out, and bytes that are back before they are needed, slot by slot."""
        problem, columns, count = self.problem, self.columns, self.slots.count
        self.out_rate = self._link_rate([problem.out_seconds(value) for value in self.candidates])
        self.in_rate = self._link_rate([problem.in_seconds(value) for value in self.candidates])
        self.stall = [pulp.LpVariable(f"stall_{slot}", 0) for slot in range(count)]
        self.not_out = [pulp.LpVariable(f"not_out_{slot}", 0) for slot in range(count)]
        self.ahead: dict[int, pulp.LpVariable] = {}
        self.arriving: dict[int, pulp.LpVariable] = {}
        saved: dict[int, list[int]] = {}
        needed: dict[int, list[int]] = {}
        for value in columns.swap:
            saved.setdefault(self.save_slot[value], []).append(value)
            needed.setdefault(self.use_slot[value], []).append(value)
        replays = self._replay_terms()
        kappa = (1 - problem.link.duplex) / problem.link.duplex
        for slot in range(count):
            is_backward = slot >= self.slots.first_backward
            out_terms = [(self.not_out[slot], -1.0), *((columns.swap[v], self.size[v]) for v in saved.get(slot, ()))]
            if slot > 0:
                out_terms.append((self.not_out[slot - 1], 1.0))
            out_terms.append((self.stall[slot], -self.out_rate))
            spare = self.seconds[slot - 1] * (1 + problem.link.interference_out) * self.out_rate if slot else 0.0
            if is_backward:
                self._in_rows(slot, needed.get(slot, ()), replays)
                if slot - 1 in self.arriving:
                    # What a half-duplex link carries inwards it cannot carry outwards.
                    out_terms.append((self.arriving[slot - 1], kappa * self.out_rate / self.in_rate))
            self._row(out_terms, pulp.LpConstraintLE, spare)

    def _in_rows(
        self, slot: int, needed: Sequence[int], replays: dict[int, list[tuple[pulp.LpVariable, float]]]
    ) -> None:
        problem, columns = self.problem, self.columns
        ahead = pulp.LpVariable(f"ahead_{slot}", 0)
        arriving = pulp.LpVariable(f"arriving_{slot}", 0)
        during_stall = pulp.LpVariable(f"during_stall_{slot}", 0)
        terms = [(ahead, 1.0), (during_stall, -1.0), *((columns.swap[value], self.size[value]) for value in needed)]
        if slot - 1 in self.ahead:
            terms += [(self.ahead[slot - 1], -1.0), (self.arriving[slot - 1], -1.0)]
        self._row(terms, pulp.LpConstraintEQ, 0)
        self._row([(during_stall, 1), (self.stall[slot], -self.in_rate)], pulp.LpConstraintLE, 0)
        spare = self.seconds[slot] * (1 + problem.link.interference_in) * self.in_rate
        replayed = [(variable, -seconds * self.in_rate) for variable, seconds in replays.get(slot, ())]
        self._row([(arriving, 1.0), *replayed], pulp.LpConstraintLE, spare)
        self.ahead[slot], self.arriving[slot] = ahead, arriving

    def _replay_terms(self) -> dict[int, list[tuple[pulp.LpVariable, float]]]:
        """Per slot: (variable, scaled seconds) whose sum is the replay time there."""
        terms: dict[int, list[tuple[pulp.LpVariable, float]]] = {}
        for value, recompute in self.columns.recompute.items():
            replay = self.problem.replay.replays[value]
            assert replay is not None
            seconds = replay.seconds / self.time_unit_s
            before = None
            for slot, replayed, _ in self.columns.early.get(value, ()):
                terms.setdefault(slot, []).append((replayed, seconds))
                if before is not None:
                    terms[slot].append((before, -seconds))
                before = replayed
            terms.setdefault(self.use_slot[value], []).append((recompute, seconds))
            if before is not None:
                terms[self.use_slot[value]].append((before, -seconds))
        return terms

    def _memory(self) -> None:
        fixed, gap_all = self._fixed_bytes()
        transients = self._transients()
        ticks = self._row_ticks(fixed, gap_all, transients)
        held = self._held_columns(ticks)
        claims = self._claims()
        early_fetches = self._early_fetches()
        for tick, kept in zip(ticks, held, strict=True):
            slot = self._slot_at(tick)
            room = (self.budget_bytes - float(fixed[tick]) - self.tightened.get(tick, 0)) / self.unit
            terms = [(kept, 1.0)]
            terms += self._replayed_at(slot, tick)
            terms += [(variable, size) for first, last, variable, size in claims if first <= tick <= last]
            if tick in transients:
                terms.append((transients[tick], 1.0))
            if slot >= self.slots.first_backward:
                terms += [(self.ahead[slot], 1.0), (self.arriving[slot], 1.0), (self.not_out[slot], 1.0)]
                self._row(terms, pulp.LpConstraintLE, room)
            else:
                self._row(terms, pulp.LpConstraintLE, room)
                alive = [(self.columns.swap[v], -self.size[v]) for v in self._saved_and_alive(tick, slot)]
                self._row([*terms, (self.not_out[slot], 1.0), *alive], pulp.LpConstraintLE, room)
        for slot, wanted in early_fetches.items():
            self._row([(self.ahead[slot], 1.0), *((v, -size) for v, size in wanted)], pulp.LpConstraintGE, 0)

    def _fixed_bytes(self) -> tuple[Ints, Ints]:
        """Per tick: bytes that no candidate's decision moves, and bytes of candidates that some decision moves."""
        problem = self.problem
        last = problem.tick_count - 1
        change = np.zeros(problem.tick_count + 1, dtype=np.int64)
        moved = np.zeros(problem.tick_count + 1, dtype=np.int64)
        candidates = set(self.candidates)
        for value in range(problem.value_count):
            size_bytes = int(problem.rounded_bytes[value])
            until = int(min(max(problem.forward_death[value], problem.freed[value]), last))
            change[problem.born[value]] += size_bytes
            change[until + 1] -= size_bytes
            if value in candidates:
                first, end = self._gap(value)
                moved[first] += size_bytes
                moved[end + 1] -= size_bytes
        gap = np.cumsum(moved)[:-1]
        return problem.base_bytes + np.cumsum(change)[:-1] - gap, gap

    def _gap(self, value: int) -> tuple[int, int]:
        """First and last tick at which a decision moves a value's bytes."""
        problem = self.problem
        last = problem.tick_count - 1
        end = int(problem.first_use[value]) - 1
        if problem.first_use_point[value] < 0:
            end = int(min(max(problem.forward_death[value], problem.freed[value]), last))
        return int(min(problem.forward_death[value] + 1, end + 1)), end

    def _slot_at(self, tick: int) -> int:
        return max(0, int(np.searchsorted(self.slots.start_tick, tick, side="right")) - 1)

    def _row_ticks(self, fixed: Ints, gap_all: Ints, transients: dict[int, pulp.LpVariable]) -> list[int]:
        """Ticks that need a row: could go over budget, and dominated by no other tick of their slot.

        Within a slot the decided bytes only grow in forward (values die) and only shrink in backward (values return),
        so that a tick is dominated by a later (earlier) one with no less fixed bytes.
        """
        rows = {*transients, *self.tightened}
        bounds = [*self.slots.start_tick.tolist(), self.problem.tick_count]
        over = fixed + gap_all > self.budget_bytes
        for slot in range(self.slots.count):
            ticks = range(bounds[slot], bounds[slot + 1])
            best = -1
            for tick in reversed(ticks) if slot < self.slots.first_backward else ticks:
                if fixed[tick] > best:
                    best = int(fixed[tick])
                    if over[tick]:
                        rows.add(tick)
        rows.update(int(tick) for tick in np.flatnonzero(over[: bounds[0]]))
        return sorted(rows)

    def _held_columns(self, ticks: list[int]) -> list[pulp.LpVariable]:
        """Per row tick: bytes of kept candidates between their forward death and their first use."""
        held = [pulp.LpVariable(f"kept_{tick}", 0) for tick in ticks]
        enter: dict[int, list[tuple[int, float]]] = {}
        for value in self.candidates:
            first, end = self._gap(value)
            start, stop = int(np.searchsorted(ticks, first)), int(np.searchsorted(ticks, end + 1))
            if start < stop:
                enter.setdefault(start, []).append((value, 1.0))
                enter.setdefault(stop, []).append((value, -1.0))
        for index, variable in enumerate(held):
            terms = [(variable, 1.0)]
            constant = 0.0
            if index > 0:
                terms.append((held[index - 1], -1.0))
            for value, sign in enter.get(index, ()):
                constant += sign * self.size[value]
                terms += self._not_kept(value, sign * self.size[value])
            self._row(terms, pulp.LpConstraintEQ, constant)
        return held

    def _not_kept(self, value: int, weight: float) -> list[tuple[pulp.LpVariable, float]]:
        terms = [(self.columns.swap[value], weight)]
        if value in self.columns.recompute:
            terms.append((self.columns.recompute[value], weight))
        return terms

    def _saved_and_alive(self, tick: int, slot: int) -> list[int]:
        """Swappable values that may have left for the host while forward still holds them."""
        death, save_slot = self.problem.forward_death, self.save_slot
        return [v for v in self.columns.swap if save_slot[v] <= slot and death[v] >= tick]

    def _replayed_at(self, slot: int, tick: int) -> list[tuple[pulp.LpVariable, float]]:
        terms = []
        for value, early in self.columns.early.items():
            if early and early[0][0] <= slot and tick < self.problem.first_use[value]:
                latest = [replayed for start, replayed, _ in early if start <= slot][-1]
                terms.append((latest, self.size[value]))
        return terms

    def _early_fetches(self) -> dict[int, list[tuple[pulp.LpVariable, float]]]:
        """Per slot: fetches for a replay before the value's own use."""
        wanted: dict[int, list[tuple[pulp.LpVariable, float]]] = {}
        for value, early in self.columns.early.items():
            for index, (slot, _, fetched) in enumerate(early):
                end = early[index + 1][0] if index + 1 < len(early) else self.use_slot[value]
                for inside in range(slot, min(end, self.slots.count)):
                    wanted.setdefault(inside, []).append((fetched, self.size[value]))
        return wanted

    def _claims(self) -> list[tuple[int, int, pulp.LpVariable, float]]:
        """(first tick, last tick, variable, bytes): a value held after its own last use for a later replay."""
        problem = self.problem
        claims = []
        for value, users in self.consumers.items():
            late = sorted((int(problem.first_use[u]), u) for u in users if problem.first_use[u] > problem.freed[value])
            after: pulp.LpVariable | None = None
            for index in reversed(range(len(late))):
                tick, user = late[index]
                first = late[index - 1][0] + 1 if index else int(problem.freed[value]) + 1
                held = pulp.LpVariable(f"claim_{value}_{user}", 0, 1)
                self._row([(held, 1), (self.columns.recompute[user], -1)], pulp.LpConstraintGE, 0)
                if after is not None:
                    self._row([(held, 1), (after, -1)], pulp.LpConstraintGE, 0)
                claims.append((first, min(tick, problem.tick_count - 1), held, self.size[value]))
                after = held
        return claims

    def _transients(self) -> dict[int, pulp.LpVariable]:
        """Per tick of a use point: bytes that a replay there holds beyond the value it brings back."""
        problem = self.problem
        transients: dict[int, pulp.LpVariable] = {}
        for value, recompute in self.columns.recompute.items():
            inside = (problem.replay.merged((value,)).peak_bytes - int(problem.rounded_bytes[value])) / self.unit
            point = problem.first_use_point[value]
            if point < 0 or inside <= 0:
                continue
            before = None
            for slot, replayed, _ in self.columns.early.get(value, ()):
                tick = int(self.slots.start_tick[slot])
                self._transient_row(transients, tick, replayed, before, inside)
                before = replayed
            self._transient_row(transients, int(problem.point_ticks[point]), recompute, before, inside)
        return transients

    def _transient_row(
        self,
        transients: dict[int, pulp.LpVariable],
        tick: int,
        now: pulp.LpVariable,
        before: pulp.LpVariable | None,
        inside: float,
    ) -> None:
        if tick not in transients:
            transients[tick] = pulp.LpVariable(f"inside_{tick}", 0)
        terms = [(transients[tick], 1.0), (now, -inside)]
        if before is not None:
            terms.append((before, inside))
        self._row(terms, pulp.LpConstraintGE, 0)

    def _objective(self) -> None:
        problem, columns, link = self.problem, self.columns, self.problem.link
        terms = [(stall, 1.0) for stall in self.stall]
        for value, recompute in columns.recompute.items():
            replay = problem.replay.replays[value]
            assert replay is not None
            terms.append((recompute, replay.seconds / self.time_unit_s + SWAP_PREFERENCE))
        for value, swap in columns.swap.items():
            out_s, in_s = problem.out_seconds(value), problem.in_seconds(value)
            slowed = out_s * link.interference_out / (1 + link.interference_out)
            slowed += in_s * link.interference_in / (1 + link.interference_in)
            terms.append((swap, (slowed + SWAP_PREFERENCE * (out_s + in_s)) / self.time_unit_s))
        columns.lp.setObjective(pulp.LpAffineExpression(terms))

"""The oracle's walk through the clock: every schedule in which given values are recomputed. See ``oracle.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations
from typing import NamedTuple

from poochplan.formats.plan import Decision
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import assemble
from poochplan.planner.simulator.simulate import movable
from tests.planner.clock import Clock, is_plain, run, take, wait

FUTURE, HERE, LEAVING, AWAY, DROPPED, BACK = range(6)
"""Where a value is: not saved yet; in forward's storage (still to leave, or on its way); on the host; waiting for its
replay; on the device for good."""


@dataclass(frozen=True)
class Freedom:
    """What the search may vary; taking one thing away tells what it is worth."""

    early_replay: bool = True
    """Replays before a value's own use; else each at its use, with what it starts from."""
    out_order: bool = True
    """Any queue outwards; else in the order of saves."""
    release_choice: bool = True
    """Any set of releases; else those first that forward lets go of first."""
    prefetch_order: bool = True
    """Any queue inwards; else in the order of first need."""
    leave_late: bool = True
    """A value may leave after a replay has read it; else it must have left before, or stay."""
    decisions: tuple[Decision, ...] | None = None
    """These decisions only; swapped values may stay."""


class Actions(NamedTuple):
    swap_out: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    prefetch: tuple[int, ...] = ()
    replay: tuple[int, ...] = ()


class State(NamedTuple):
    places: tuple[int, ...]
    clock: Clock
    slack: float
    """Bytes that were free at every tick since the last use point."""
    actions: Actions
    before: State | None


class Run(NamedTuple):
    """One replay inside a point."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    peak_bytes: int
    ops: tuple[int, ...]


def subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))


def sequences(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(permutations(items, count) for count in range(len(items) + 1))


class Search:
    """All schedules in which exactly ``recomputed`` are recomputed."""

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        recomputed: frozenset[int],
        freedom: Freedom,
        at_most_s: float,
        plain_rules: bool,
    ) -> None:
        self.problem, self.budget_bytes, self.freedom, self.at_most_s = problem, budget_bytes, freedom, at_most_s
        self.recomputed = recomputed
        self.plain_rules = plain_rules
        self.values = range(problem.value_count)
        able = {value for value in movable(problem) if value not in recomputed}
        if freedom.decisions is not None:
            able = {value for value in able if freedom.decisions[value] is Decision.SWAP}
        self.swappable = able
        self.size = problem.rounded_bytes.tolist()
        self.born, self.death = problem.born.tolist(), problem.forward_death.tolist()
        self.held = [max(d, f) for d, f in zip(self.death, problem.freed.tolist(), strict=True)]
        self.ticks = [*problem.point_ticks.tolist(), problem.tick_count]
        self.base = problem.base_bytes.tolist()
        self.op_at = [*problem.point_ops, len(problem.op_ticks)]
        self.recorded = self._recorded()
        self.work = self._work()
        self.inputs = [replay.inputs if replay is not None else () for replay in problem.replay.replays]
        self.claimers = [[v for v in recomputed if value in self.inputs[v]] for value in self.values]
        self.is_replayed, self.claims_until = self._fates()
        self.need = self._first_needs()

    def _fates(self) -> tuple[list[bool], list[int]]:
        """Per recomputed value: whether it is ever replayed, and until when it claims its inputs if it is not."""
        is_replayed = [v in self.recomputed and self.problem.first_use_point[v] >= 0 for v in self.values]
        until = [int(freed) for freed in self.problem.freed]
        for _ in self.values:
            for value in self.recomputed:
                for claimer in self.claimers[value]:
                    is_replayed[value] |= is_replayed[claimer]
                    if not is_replayed[claimer]:
                        until[value] = max(until[value], until[claimer])
        return is_replayed, until

    def _recorded(self) -> list[bool]:
        """Per op: whether it is recorded, which follows from what is recomputed."""
        problem = self.problem
        wish = [Decision.RECOMPUTE if value in self.recomputed else Decision.KEEP for value in self.values]
        schedule = assemble(problem, wish, {})
        saves = [problem.point_ops[point] for point in problem.save_points]
        switches = [(saves[action.index], action.record) for action in schedule.actions if action.record]
        found, is_on = [], schedule.record_from_start
        for op in range(len(problem.op_ticks)):
            for at, switch in switches:
                is_on = switch == "on" if at == op else is_on
            found.append(is_on and op < max(saves))
        return found

    def _work(self) -> list[float]:
        """Seconds of the compute stream before each point, and in all."""
        problem, cost = self.problem, self.problem.launch_cost
        record_s = cost.record_s if cost.is_compute else 0.0
        before = [*problem.point_work_s.tolist(), problem.step_s]
        return [work_s + record_s * sum(self.recorded[:op]) for work_s, op in zip(before, self.op_at, strict=True)]

    def _first_needs(self) -> list[int]:
        """Per value: the first point that needs it when every replay is at its value's own use."""
        first = [point if point >= 0 else len(self.ticks) for point in self.problem.first_use_point]
        for _ in self.values:
            for value in self.values:
                first[value] = min([first[value], *(first[claimer] for claimer in self.claimers[value])])
        return first

    # -- the walk -------------------------------------------------------------------------------------------------

    def best(self) -> State | None:
        if max(self._bytes(0, self.ticks[0], (FUTURE,) * len(self.values), ()), default=0) > self.budget_bytes:
            return None
        frontier = [State((FUTURE,) * len(self.values), Clock(0.0, (), ()), 0.0, Actions(), None)]
        for point in range(len(self.ticks) - 1):
            kept: dict[object, list[tuple[tuple[float, ...], State]]] = {}
            for state in frontier:
                for after in self._after(state, point):
                    self._add(kept, after, point)
            frontier = [state for states in kept.values() for _, state in states]
        ends = [state._replace(clock=self._advance(state.clock, len(self.ticks) - 2)) for state in frontier]
        ends = [state for state in ends if state.clock.now_s <= self.at_most_s]
        return min(ends, key=lambda state: state.clock.now_s, default=None)

    def _advance(self, clock: Clock, point: int) -> Clock:
        """To the next point after ``point``."""
        link, cost = self.problem.link, self.problem.launch_cost
        if cost.is_compute:
            before_s = self.work[point] if point >= 0 else 0.0
            return run(link, clock, self.work[point + 1] - before_s)
        if point < 0:
            clock = take(link, cost.is_compute, clock, float(cost.handles_s[0]))
        for op in range(self.op_at[point] if point >= 0 else 0, self.op_at[point + 1]):
            own_s = cost.record_s if self.recorded[op] else 0.0
            clock = self._launch(clock, op, own_s)
            clock = take(link, cost.is_compute, clock, float(cost.handles_s[op + 1]))
        return take(link, cost.is_compute, clock, 0.0)

    def _launch(self, clock: Clock, op: int, own_s: float) -> Clock:
        """Computes one op, for which the runtime takes ``own_s`` besides."""
        problem, link, cost = self.problem, self.problem.link, self.problem.launch_cost
        clock = run(link, take(link, cost.is_compute, clock, own_s), problem.replay.op_seconds[op])
        return clock._replace(thread_s=clock.thread_s + float(cost.launch_s[op]))

    def _add(self, kept: dict[object, list[tuple[tuple[float, ...], State]]], state: State, point: int) -> None:
        waiting = tuple(v for v in sorted(self.recomputed) if state.places[v] == DROPPED and self.is_replayed[v])
        left_s = self.work[-1] - self.work[point]
        left_s += self.problem.replay.merged(waiting).seconds if waiting else 0.0
        if state.clock.now_s + left_s > self.at_most_s:
            return
        if self.plain_rules:
            key: object = state.places
            vector = (state.slack, *state.clock.ends(len(self.values)))
        elif is_plain(self.problem.link):
            key = (state.places, state.clock.rounded())
            vector = (state.clock.now_s, state.clock.thread_s)
        else:  # later may be better, unless everything is later by the same
            ahead_s = state.clock.now_s - state.clock.thread_s
            key = (state.places, state.clock.rounded(), round(ahead_s, 13))
            vector = (state.clock.now_s,)
        entries = kept.setdefault(key, [])
        if any(all(a <= b for a, b in zip(other, vector, strict=True)) for other, _ in entries):
            return
        entries[:] = [e for e in entries if not all(a <= b for a, b in zip(vector, e[0], strict=True))]
        entries.append((vector, state))

    def _after(self, state: State, point: int) -> Iterator[State]:
        """Every state that can follow, at the end of ``point``."""
        clock = self._advance(state.clock, point - 1)
        places = list(state.places)
        value = self.problem.point_value[point]
        is_save = self.problem.point_is_save[point]
        if is_save:
            places[value] = DROPPED if value in self.recomputed else HERE if value in self.swappable else BACK
            if places[value] == DROPPED:
                cost = self.problem.launch_cost
                clock = take(self.problem.link, cost.is_compute, clock, cost.drop_s)
        for issued in self._issues(places, point):
            moved = [LEAVING if v in issued else place for v, place in enumerate(places)]
            if is_save:
                backs: Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[Run, ...]]] = iter([((), (), ())])
            else:
                backs = self._backs(moved, point, value)
            for fetched, replays, runs in backs:
                yield from self._released(state, clock, moved, point, issued, fetched, replays, runs)

    def _issues(self, places: list[int], point: int) -> Iterator[tuple[int, ...]]:
        first_use = self.problem.first_use_point
        pending = [v for v in self.values if places[v] == HERE and not 0 <= first_use[v] <= point]
        if not self.plain_rules:
            yield from sequences(pending)
            return
        yield ()
        value = self.problem.point_value[point]
        if self.problem.point_is_save[point] and value in pending:
            others = [v for v in pending if v != value] if self.freedom.out_order else []
            for behind in sequences(others):
                yield (value, *behind)

    def _backs(
        self, places: list[int], point: int, used: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[Run, ...]]]:
        """(fetched, replayed, runs): which values come back at a use point."""
        tick = self.ticks[point]
        dropped = [v for v in self.recomputed if places[v] == DROPPED]
        early = [v for v in dropped if self.is_replayed[v] or tick <= self.claims_until[v]]
        away = [v for v in self.values if places[v] == AWAY and self._is_needed(v, places, point)]
        for replays in sequences(early) if self.freedom.early_replay else [()]:
            runs = self._runs(places, replays, used)
            if runs is None:
                continue
            wanted = {source for one in runs for source in one.sources if places[source] == AWAY}
            must = ({used} & set(away)) | wanted if self.plain_rules else set()
            for more in subsets([v for v in away if v not in must]):
                yield (*sorted(must), *more), replays, runs

    def _is_needed(self, value: int, places: Sequence[int], point: int) -> bool:
        if self.problem.first_use_point[value] >= point:
            return True
        return any(places[v] == DROPPED and self.is_replayed[v] for v in self.claimers[value])

    def _runs(self, places: Sequence[int], replays: tuple[int, ...], used: int) -> tuple[Run, ...] | None:
        """The replays of a point, that of the value used there last; None when one of them would do nothing."""
        is_back = {v for v in self.recomputed if places[v] != DROPPED}
        runs = []
        for position, value in enumerate((*replays, used)):
            if value in is_back or value not in self.recomputed:
                if position == len(replays):
                    break
                return None
            targets, pending = {value}, [value]
            while pending:
                new = {v for v in self.inputs[pending.pop()] if v in self.recomputed and v not in is_back | targets}
                targets |= new
                pending.extend(new)
            merged = self.problem.replay.merged(tuple(sorted(targets)))
            runs.append(Run(merged.inputs, tuple(sorted(targets)), merged.peak_bytes, merged.ops))
            is_back |= targets
        return tuple(runs)

    def _released(
        self,
        state: State,
        clock: Clock,
        places: list[int],
        point: int,
        issued: tuple[int, ...],
        fetched: tuple[int, ...],
        replays: tuple[int, ...],
        runs: tuple[Run, ...],
    ) -> Iterator[State]:
        is_save, used = self.problem.point_is_save[point], self.problem.point_value[point]
        sources = {source for one in runs for source in one.sources}
        after = list(places)
        for value in (*fetched, *(t for one in runs for t in one.targets)):
            after[value] = BACK
        if len(runs) > len(replays):
            replays = (*replays, used)
        for value in sources:
            if after[value] == AWAY or not self.freedom.leave_late:
                after[value] = BACK
        if not is_save:
            after[used] = BACK
        first_use = self.problem.first_use_point
        able = [v for v in self.values if after[v] == LEAVING and v not in sources and not 0 <= first_use[v] <= point]
        start, end = self.ticks[point], self.ticks[point + 1]
        for released in self._releases(able, after, start, end, runs):
            gone = [AWAY if v in released else place for v, place in enumerate(after)]
            free = self.budget_bytes - max(self._bytes(start, end, gone, runs))
            slack = min(state.slack, free) if is_save else free
            gone = self._without_dead(gone, end)
            for order in self._orders(fetched, places, state, point):
                actions = Actions(issued, released, order, replays)
                away = {v for v in (*sources, used) if not is_save and places[v] == AWAY}.difference(order)
                timed = self._timed(clock, actions, runs, used if not is_save else -1, away)
                yield State(tuple(gone), timed, slack if self.plain_rules else 0.0, actions, state)

    def _releases(
        self, able: list[int], places: list[int], start: int, end: int, runs: tuple[Run, ...]
    ) -> Iterator[tuple[int, ...]]:
        """Inclusion-minimal sets of releases with which the ticks up to the next point fit."""
        found: list[set[int]] = []
        if not self.freedom.release_choice:
            able = sorted(able, key=lambda v: (max(int(self.problem.save_tick[v]), self.death[v] + 1), v))
        for chosen in subsets(able):
            if any(smaller <= set(chosen) for smaller in found):
                continue
            gone = [AWAY if v in chosen else place for v, place in enumerate(places)]
            if max(self._bytes(start, end, gone, runs)) <= self.budget_bytes:
                found.append(set(chosen))
        if not self.freedom.release_choice:
            rank = {value: position for position, value in enumerate(able)}
            found = sorted(found, key=lambda chosen: sorted(rank[v] for v in chosen))[:1]
        for minimal in found:
            yield tuple(sorted(minimal))

    def _orders(
        self, fetched: tuple[int, ...], places: list[int], state: State, point: int
    ) -> Iterator[tuple[int, ...]]:
        away = [v for v in self.values if places[v] == AWAY and self._is_needed(v, places, point)]
        for order in permutations(fetched):
            if not self.freedom.prefetch_order:
                by_need = sorted(away, key=lambda v: (self.need[v], v))
                if list(order) != by_need[: len(order)]:
                    continue
            if self.plain_rules and order and self.freedom.prefetch_order:
                has_use_before = self.problem.use_points[0] < point
                if has_use_before and self.size[order[0]] <= state.slack:
                    continue
            yield order

    def _timed(self, clock: Clock, actions: Actions, runs: tuple[Run, ...], used: int, away: set[int]) -> Clock:
        """The clock at the end of a point; ``away`` are the values fetched there on demand."""
        problem, link, cost = self.problem, self.problem.link, self.problem.launch_cost
        for value in actions.swap_out:
            clock = take(link, cost.is_compute, clock, cost.out_s)
            clock = clock._replace(out=(*clock.out, (value, problem.out_seconds(value))))
        for value in actions.release:
            clock = wait(link, clock, value, is_out=True)

        def fetch(clock: Clock, value: int) -> Clock:
            clock = take(link, cost.is_compute, clock, cost.fetch_s)
            return clock._replace(inward=(*clock.inward, (value, problem.in_seconds(value))))

        def needed(clock: Clock, value: int) -> Clock:
            if value in away:
                away.remove(value)
                clock = fetch(clock, value)
            return wait(link, clock, value, is_out=False)

        for value in actions.prefetch:
            clock = fetch(clock, value)
        for one in runs:
            for source in one.sources:
                clock = needed(clock, source)
            for op in one.ops:
                clock = self._launch(clock, op, cost.replay_s)
        return needed(clock, used)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _bytes(self, start: int, end: int, places: Sequence[int], runs: tuple[Run, ...]) -> list[int]:
        """Most bytes live at each tick from ``start``, the tick of a point, to ``end`` (exclusive)."""
        now = {target for one in runs for target in one.targets}
        live = [
            self.base[tick]
            + sum(self.size[v] for v in self.values if self._is_live(v, tick, places, now if tick == start else ()))
            for tick in range(start, end)
        ]
        if runs:
            inside = live[0] - sum(self.size[target] for target in now)
            for one in runs:
                live[0] = max(live[0], inside + one.peak_bytes)
                inside += sum(self.size[target] for target in one.targets)
        return live

    def _is_live(self, value: int, tick: int, places: Sequence[int], replayed_now: set[int] | tuple[()]) -> bool:
        if tick < self.born[value]:
            return False
        if places[value] in (AWAY, DROPPED):
            return tick <= self.death[value]
        if tick <= self.held[value] or value in replayed_now:
            return True
        for claimer in self.claimers[value]:
            if claimer in replayed_now:
                return True
            if places[claimer] == DROPPED and (self.is_replayed[claimer] or tick <= self.claims_until[claimer]):
                return True
        return False

    def _without_dead(self, places: list[int], tick: int) -> list[int]:
        """One name for the place of every value whose life is over, so that states meet. That of a source is not,
        before its copy's save point.
        """
        return [
            BACK
            if place not in (FUTURE, DROPPED)
            and tick > self.held[v]
            and all(places[c] not in (FUTURE, DROPPED) for c in self.claimers[v])
            else place
            for v, place in enumerate(places)
        ]

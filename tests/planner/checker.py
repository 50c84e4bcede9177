"""An independent judge of plans: replays a plan tick by tick against its profile. Shares no code with the planner.

It walks through every op and point of the step, keeps each storage in its hands, runs every replay op by op with
versions of contents, and fails on the first thing that the runtime could not do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from poochplan.formats.plan import Plan, PointActions
from poochplan.formats.profile import Profile, Value

from .state_checker import StreamedState


class Violation(AssertionError):
    """The plan asks for something that cannot be done, or leaves something undone."""


@dataclass
class Verdict:
    """What the plan was seen to do."""

    peak_bytes: int = 0
    first_step_peak_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    host_slab_bytes: int = 0


@dataclass
class _Entry:
    value: int
    decision: str
    in_forward_storage: bool = True
    in_new_storage: bool = False
    on_host: bool = False
    copy_started: bool = False
    has_been_back: bool = False
    claims: set[int] = field(default_factory=set)


def check(profile: Profile, plan: Plan) -> Verdict:
    """Walks through the step; raises :class:`Violation`."""
    return Judge(profile, plan).walk()


def _ensure(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


class Judge:
    """State: where each value of the plan is, tick by tick."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self.plan = profile, plan
        self.values = profile.values
        self.timeline = self._merge()
        self.tick_of_op = {item: tick for tick, (what, item) in enumerate(self.timeline) if what == "op"}
        self.writers: dict[int, list[int]] = {v: [] for v in range(len(profile.values))}
        for number, op in enumerate(profile.ops):
            if op.phase.value == "forward":
                for value in [*op.outputs, *op.writes]:
                    self.writers[value].append(number)
        self.saved, self.save_ops = self._saves()
        self.entry_of = {value: index for index, value in enumerate(self.saved)}
        self.handles, self.uses = self._handles()
        self.version_saved = {
            index: sum(writer < op for writer in self.writers[self.saved[index]])
            for index, op in enumerate(self.save_ops)
        }
        self.done_saves = 0
        self.verdict = Verdict()
        self.entries: dict[int, _Entry] = {}
        self.recorded = self._recorded_ops()
        self.needs: dict[int, tuple[set[int], set[int]]] = {}
        self.state = StreamedState(profile, plan, self._rounded)
        self.lives = [(self._born(record), self._bytes(value)) for value, record in enumerate(self.values)]
        of_optimizer = (n for n, op in enumerate(profile.ops) if op.phase.value == "optimizer")
        self.first_optimizer = min((self.tick_of_op[number] for number in of_optimizer), default=-1)
        states = (n for n, v in enumerate(self.values) if v.kind.value == "optimizer_state" and v.born < 0)
        self.state_bytes = sum(map(self._bytes, states))

    def _saves(self) -> tuple[list[int], list[int]]:
        """Per value of the plan: the profile's value, and the ops completed before its save point. A source has the
        save point of the value after it.
        """
        points = [p for p in self.profile.points if p.kind.value == "save"]
        own = iter([self.profile.handles[p.handle].value for p in points])
        ops = iter([p.op for p in points])
        by_name = {record.name: value for value, record in enumerate(self.values)}
        saved, save_ops = list[int](), list[int]()
        _ensure(not self.plan.values or not self.plan.values[-1].source, "a saved value after each source")
        for planned in self.plan.values:
            if planned.source:
                _ensure(planned.name in by_name, f"no value {planned.name}")
                saved.append(by_name[planned.name])
                continue
            op = next(ops, 0)
            save_ops += [op] * (len(saved) + 1 - len(save_ops))
            saved.append(next(own, -1))
        _ensure(next(own, None) is None and -1 not in saved, "a plan for the saved values")
        return saved, save_ops

    def _handles(self) -> tuple[list[int], list[int]]:
        """The plan's value of each handle, and the handles used, as the plan numbers them: a source has one."""
        handles, number = list[int](), dict[int, int]()
        for ordinal, handle in enumerate(self.profile.handles):
            index = self.entry_of[handle.value]
            if index and self.plan.values[index - 1].source and index not in handles:
                handles.append(index - 1)
            number[ordinal] = len(handles)
            handles.append(index)
        return handles, [number[p.handle] for p in self.profile.points if p.kind.value == "use"]

    def _merge(self) -> list[tuple[str, int]]:
        timeline: list[tuple[str, int]] = []
        points = list(enumerate(self.profile.points))
        for number in range(len(self.profile.ops)):
            while points and points[0][1].op == number:
                timeline.append(("point", points.pop(0)[0]))
            timeline.append(("op", number))
        timeline.extend(("point", index) for index, _ in points)
        return timeline

    def _recorded_ops(self) -> set[int]:
        switch = {action.index: action.record for action in self.plan.schedule if action.at == "save" and action.record}
        recorded, on = set(), self.plan.record_from_start
        for number in range(len(self.profile.ops)):
            pending = ""
            for index, op in enumerate(self.save_ops):
                if op == number and switch.get(index) == "off":
                    on, pending = False, ""
                if op == number and switch.get(index) == "on":
                    pending = "on"
            if on:
                recorded.add(number)
            on = on or pending == "on"
        return recorded

    # -- the walk ---------------------------------------------------------------------------------------------

    def walk(self) -> Verdict:
        self._check_header()
        done_uses = 0
        actions = {(action.at, action.index): action for action in self.plan.schedule}
        for tick, (what, item) in enumerate(self.timeline):
            if what == "op":
                self._note(tick, self._rounded(self.state.workspace[item]))
            else:
                point = self.profile.points[item]
                if point.kind.value == "save":
                    while self.plan.values[self.done_saves].source:
                        self._check_source(tick, self.done_saves)
                        self._pass_save(tick, actions)
                        self._note(tick)
                    self._pass_save(tick, actions)
                else:
                    self._act(tick, actions.pop(("use", done_uses), None))
                    self._check_use(tick, point.handle)
                    done_uses += 1
                self._note(tick)
            self._end_of_tick(tick)
        _ensure(not actions, f"actions at points that do not exist: {sorted(actions)}")
        self._check_host()
        return self.verdict

    def _pass_save(self, tick: int, actions: dict[tuple[Any, int], PointActions]) -> None:
        self._bind(self.done_saves)
        self._act(tick, actions.pop(("save", self.done_saves), None))
        self.done_saves += 1

    def _check_source(self, tick: int, index: int) -> None:
        """It is there, is not written later, and one recorded op makes the next value of it alone."""
        source, copy = self.saved[index], self.saved[index + 1]
        record, made_by = self.values[source], self.writers[copy]
        _ensure(all(handle.value != source for handle in self.profile.handles), f"{record.name} is saved itself")
        _ensure(len(made_by) == 1 and made_by[0] < self.save_ops[index + 1], f"{record.name} is no source")
        op = self.profile.ops[made_by[0]]
        _ensure(op.name in ("aten._to_copy.default", "aten.clone.default"), f"{op.name} makes no copy")
        _ensure(op.inputs == (source,) and not op.opaque, f"{op.name} reads something else")
        _ensure(record.born >= 0 and tick <= record.forward_death, f"{record.name} is gone at its save point")
        writes = [number for number, one in enumerate(self.profile.ops) if source in one.writes]
        _ensure(all(number < made_by[0] for number in writes), f"{record.name} is written after it was copied")
        if self.plan.values[index].until >= 0:
            _ensure(made_by[0] in self.recorded, f"the copy of {record.name} is not recorded")

    def _check_header(self) -> None:
        plan = self.plan
        _ensure([v.name for v in plan.values] == [self.values[v].name for v in self.saved], "values in save order")
        _ensure(plan.handles == tuple(self.handles), "handles in pack order")
        _ensure(plan.uses == tuple(self.uses), "uses in order")
        for index, planned in enumerate(plan.values):
            record = self.values[self.saved[index]]
            if record.pinned:
                _ensure(planned.decision.value == "keep", f"{planned.name} is pinned but {planned.decision}")
            if planned.decision.value == "recompute":
                _ensure(not record.unreplayable, f"{planned.name} cannot be replayed")

    def _bind(self, index: int) -> None:
        decision = self.plan.values[index].decision.value
        entry = self.entries[index] = _Entry(index, decision)
        if decision == "recompute":
            entry.in_forward_storage = False
            entry.claims = self._needs(index)[1]

    def _act(self, tick: int, action: PointActions | None) -> None:
        if action is None:
            return
        for index in action.swap_out:
            entry = self._entry(index)
            _ensure(entry.decision == "swap" and not entry.copy_started, f"swap_out of {index} at tick {tick}")
            entry.copy_started = True
            self.verdict.out_bytes += self.values[self.saved[index]].size_bytes
        for index in action.release:
            entry = self._entry(index)
            _ensure(entry.copy_started and entry.in_forward_storage, f"release of {index} at tick {tick}")
            entry.in_forward_storage, entry.on_host = False, True
        for index in action.prefetch:
            entry = self._entry(index)
            _ensure(entry.on_host and not entry.in_new_storage, f"prefetch of {index} at tick {tick}")
            entry.in_new_storage = entry.has_been_back = True
            self.verdict.in_bytes += self.values[self.saved[index]].size_bytes
        for index in action.replay:
            self._replay(tick, index)

    def _entry(self, index: int) -> _Entry:
        _ensure(index in self.entries, f"value {index} is not saved yet")
        return self.entries[index]

    def _check_use(self, tick: int, handle: int) -> None:
        entry = self._entry(self.entry_of[self.profile.handles[handle].value])
        _ensure(self._resident(entry), f"value {entry.value} ({entry.decision}) is away at its use, tick {tick}")

    @staticmethod
    def _resident(entry: _Entry) -> bool:
        return entry.in_forward_storage or entry.in_new_storage

    # -- lifetimes and bytes ----------------------------------------------------------------------------------

    def _rounded(self, size_bytes: int) -> int:
        unit = self.profile.allocation_unit_bytes
        if self.profile.memory == "allocated" and self.profile.device.kind == "cpu" and size_bytes < 64:
            return 0
        return (size_bytes + unit - 1) // unit * unit

    def _bytes(self, value: int) -> int:
        return self._rounded(self.state.sizes[value])

    def _born(self, record: Value) -> int:
        return self.tick_of_op.get(record.born, 0) if record.born_tick is None else record.born_tick

    def _live_bytes(self, tick: int) -> int:
        total = 0
        for value, (born, size_bytes) in enumerate(self.lives):
            if tick < born:
                continue
            record, index = self.values[value], self.entry_of.get(value)
            if index is None:
                copies = int(tick <= record.freed)
            elif index not in self.entries:
                copies = 1  # not packed yet
            else:
                entry = self.entries[index]
                copies = int(tick <= record.forward_death or entry.in_forward_storage) + int(entry.in_new_storage)
            total += copies * size_bytes
        return total

    def _note(self, tick: int, extra_bytes: int = 0) -> None:
        live = self._live_bytes(tick) + extra_bytes
        live += self._rounded(self.state.window_bytes) if tick >= self.first_optimizer else 0
        self.verdict.peak_bytes = max(self.verdict.peak_bytes, live)
        if tick < self.first_optimizer:
            live -= self.state_bytes
        self.verdict.first_step_peak_bytes = max(self.verdict.first_step_peak_bytes, live)

    def _end_of_tick(self, tick: int) -> None:
        held = {number for number, value in enumerate(self.saved) if tick < self.values[value].freed}
        held |= {number for number, value in enumerate(self.plan.values) if value.until >= self.done_saves}
        pending = [number for number in held if number in self.entries]
        while pending:
            entry = self.entries[pending.pop()]
            if entry.decision == "recompute" and not entry.has_been_back:
                pending += [number for number in entry.claims - held if number in self.entries]
                held |= entry.claims
        for entry in self.entries.values():
            planned = self.plan.values[entry.value]
            is_idle = planned.source and planned.until < 0  # the runtime does not look for it
            if entry.value not in held or (is_idle and tick >= self.values[self.saved[entry.value]].freed):
                entry.in_forward_storage = entry.in_new_storage = False

    # -- replays ----------------------------------------------------------------------------------------------

    def _version_read(self, value: int, op: int) -> int:
        return sum(writer < op for writer in self.writers[value])

    def _is_entry(self, value: int, version: int) -> bool:
        return value in self.entry_of and self.version_saved[self.entry_of[value]] == version

    def _needs(self, index: int) -> tuple[set[int], set[int]]:
        """(ops, saved values) that a replay of this value alone comes to."""
        if index not in self.needs:
            ops: set[int] = set()
            entries: set[int] = set()

            def need(value: int, version: int, is_root: bool = False) -> None:
                if self._is_from_before(value):
                    return
                if not is_root and self._is_entry(value, version):
                    entries.add(self.entry_of[value])
                    return
                for writer in self.writers[value][:version]:
                    if writer not in ops:
                        ops.add(writer)
                        for read in {*self.profile.ops[writer].inputs, *self.profile.ops[writer].writes}:
                            need(read, self._version_read(read, writer))

            need(self.saved[index], self.version_saved[index], is_root=True)
            self.needs[index] = ops, entries
        return self.needs[index]

    def _replay(self, tick: int, index: int) -> None:
        root = self._entry(index)
        if root.has_been_back:
            return
        _ensure(root.decision == "recompute", f"replay of {index}, which is {root.decision}")
        targets, ops, pending = {index}, set[int](), [index]
        while pending:
            more_ops, inputs = self._needs(pending.pop())
            ops |= more_ops
            for number in inputs - targets:
                source = self._entry(number)
                if source.decision == "recompute" and not source.has_been_back:
                    targets.add(number)
                    pending.append(number)
        self._run(tick, sorted(ops), targets)
        for target in targets:
            self.entries[target].in_new_storage = self.entries[target].has_been_back = True

    def _run(self, tick: int, ops: list[int], targets: set[int]) -> None:
        rebuilt: dict[int, int] = {}  # value -> version it is at
        wanted = {self.saved[target] for target in targets}
        last: dict[int, int] = {}
        for op in ops:
            for value in {*self.profile.ops[op].inputs, *self.profile.ops[op].writes}:
                if not self._found_elsewhere(value, op, wanted):
                    last[value] = op
        for op in ops:
            record = self.profile.ops[op]
            _ensure(op in self.recorded, f"op {op} is replayed but was not recorded")
            _ensure(not record.opaque, f"op {op} is opaque")
            for value in {*record.inputs, *record.writes}:
                self._check_input(tick, value, op, rebuilt, wanted)
            rebuilt.update(dict.fromkeys(record.outputs, 1))
            for value in record.writes:
                if value in rebuilt:
                    rebuilt[value] += 1
            inside = sum(self._bytes(value) for value in rebuilt) + self._rounded(record.workspace_bytes)
            if "batch_norm" in record.name:
                touched = {*record.inputs, *record.writes}
                inside += sum(self._bytes(v) for v in touched if self.values[v].kind.value == "buffer")
            self._note(tick, inside)
            for value in list(rebuilt):
                if value not in wanted and last.get(value, -1) <= op:
                    del rebuilt[value]
        for target in targets:
            _ensure(rebuilt.get(self.saved[target]) == self.version_saved[target], f"{target} not rebuilt")

    def _found_elsewhere(self, value: int, op: int, wanted: set[int]) -> bool:
        is_entry = value not in wanted and self._is_entry(value, self._version_read(value, op))
        return is_entry or self._is_from_before(value)

    def _is_from_before(self, value: int) -> bool:
        """Or a gathered weight, which is as little the replay's to make."""
        return self.values[value].born < 0 or self.values[value].stretch_of >= 0

    def _is_gathered(self, storage: int, tick: int) -> bool:
        stretches = (record for record in self.values if record.stretch_of == storage)
        return any(self._born(record) <= tick <= record.freed for record in stretches)

    def _check_input(self, tick: int, value: int, op: int, rebuilt: dict[int, int], wanted: set[int]) -> None:
        record = self.values[value]
        version = self._version_read(value, op)
        if record.stretch_of >= 0:
            _ensure(self._is_gathered(record.stretch_of, tick), f"op {op} reads {record.name}, which is not gathered")
        elif record.born < 0:
            _ensure(tick <= record.freed, f"op {op} reads {record.name}, which is gone")
            if value in self.profile.ops[op].writes:
                _ensure(record.kind.value == "buffer", f"op {op} would write {record.name} again")
            else:
                _ensure(version == len(self.writers[value]), f"op {op} reads {record.name}, written since")
        elif self._found_elsewhere(value, op, wanted):
            _ensure(self._resident(self._entry(self.entry_of[value])), f"op {op} reads {record.name}, which is away")
            _ensure(version == len(self.writers[value]), f"op {op} reads {record.name}, written since its save")
        else:
            _ensure(rebuilt.get(value) == version, f"op {op} reads {record.name} at {version}, found {rebuilt}")

    # -- the host ---------------------------------------------------------------------------------------------

    def _check_host(self) -> None:
        end = 0
        for planned in self.plan.values:
            if planned.decision.value == "swap":
                _ensure(planned.host_offset >= end and planned.host_offset % 4096 == 0, f"{planned.name}: host offset")
                end = planned.host_offset + planned.size_bytes
            else:
                _ensure(planned.host_offset == -1, f"{planned.name} has a place on the host but is not swapped")
        self.verdict.host_slab_bytes = end

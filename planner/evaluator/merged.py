"""What decisions need back, and when (``needs_of``), and what each replay then takes (``ReplayGraph.merged``)."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Bytes, Ints

from .codes import AHEAD, RECOMPUTE, SWAP
from .compiled import part
from .layout import (
    DURATION_S,
    FIRST_USE,
    FIRST_USE_OF,
    FREED,
    INPUTS,
    INPUTS_END,
    KEY,
    KIND,
    LAUNCH_S,
    NEVER,
    NEVER_END,
    OPS,
    OPS_END,
    OUTPUTS,
    OUTPUTS_END,
    PROFILE_VALUE,
    REPLAY_S,
    SIZE,
    TEMPORARIES,
    TEMPORARIES_END,
    TICK,
    USE_POINT,
    WORKSPACE,
    Layout,
)
from .scratch import (
    CHANGE,
    CHOSEN,
    CLAIM,
    END,
    ENTRIES,
    ENTRY,
    FINAL_NEED,
    FIRST_NEED,
    LAST_TOUCH,
    LATE_S,
    LATER_NEED,
    LAUNCHES_S,
    LEAST_ROOM,
    MARK,
    NEED_POINT,
    NEEDED,
    NODE_COUNT,
    OPS_S,
    PEAK,
    POOL_END,
    RELEASE,
    REPLAY_BYTES,
    REPLAY_COUNT,
    REPLAY_POINT,
    REPLAYED_AT,
    RUNS,
    SET_KEY,
    SOURCES,
    START,
    TARGETS,
    TO_REPLAY,
    Scratch,
    Store,
)


@part
def find_needs(layout: Layout, decisions: Bytes, scratch: Scratch) -> None:
    """When ``decisions`` need which value."""
    values, here = layout.values, scratch.values
    _make_room(scratch.store)
    scratch.counts.fill(0)
    for value in range(len(values)):
        here[value, REPLAYED_AT] = -1
        here[value, CLAIM] = -1
        here[value, FIRST_NEED] = -1
        here[value, RELEASE] = -1
    for use in range(len(layout.uses)):
        point = layout.uses[use, USE_POINT]
        value = layout.points[point, FIRST_USE_OF]
        if value >= 0:
            if decisions[value] == SWAP:
                _add_need(here, scratch.nodes, scratch.counts, value, point)
            elif decisions[value] == RECOMPUTE and here[value, REPLAYED_AT] < 0:
                _add_replay(layout, decisions, scratch, value, point)
    for k in range(layout.facts[NEVER], layout.facts[NEVER_END]):
        value = layout.lists[k]
        if decisions[value] == RECOMPUTE and here[value, REPLAYED_AT] < 0:
            until = max(values[value, FREED], here[value, CLAIM])
            for i in range(values[value, INPUTS], values[value, INPUTS_END]):
                source = layout.lists[i]
                here[source, CLAIM] = max(here[source, CLAIM], until)
    for value in range(len(values)):
        here[value, END] = max(values[value, FREED], here[value, CLAIM])


@part
def _make_room(store: Store) -> None:
    """Clears the store where one evaluation could fill it."""
    room = len(store.pool) - store.counts[POOL_END]
    if room < store.counts[LEAST_ROOM] or len(store.entries) - store.counts[ENTRIES] < len(store.slots) // 4:
        store.slots.fill(0)
        store.counts[ENTRIES] = 0
        store.counts[POOL_END] = 0


@part
def _add_need(here: Ints, nodes: Ints, counts: Ints, value: int, point: int) -> None:
    node = counts[NODE_COUNT]
    counts[NODE_COUNT] = node + 1
    nodes[node, NEED_POINT] = point
    nodes[node, LATER_NEED] = -1
    nodes[node, NEEDED] = value
    if here[value, FIRST_NEED] < 0:
        here[value, FIRST_NEED] = node
    else:
        nodes[here[value, FINAL_NEED], LATER_NEED] = node
    here[value, FINAL_NEED] = node


@part
def _add_replay(layout: Layout, decisions: Bytes, scratch: Scratch, value: int, point: int) -> None:
    """The replay of ``value`` at ``point``, and of what it starts from and is not back yet."""
    values, lists, here, store = layout.values, layout.lists, scratch.values, scratch.store
    targets, orders = scratch.orders[TO_REPLAY], scratch.orders
    count = _close(values, lists, decisions, here, store, targets, value)
    entry = _entry_of(layout, store, targets, count)
    tick, size_bytes = layout.points[point, TICK], 0
    for i in range(count):
        target = targets[i]
        here[target, REPLAYED_AT] = point
        size_bytes += values[target, SIZE]
        for k in range(values[target, INPUTS], values[target, INPUTS_END]):
            here[lists[k], CLAIM] = tick
    begin = store.entries[entry, START] + store.entries[entry, TARGETS]
    for k in range(begin, begin + store.entries[entry, SOURCES]):
        source = store.pool[k]
        if decisions[source] == SWAP:
            use = values[source, FIRST_USE]
            if use < 0 or point < use:
                _add_need(here, scratch.nodes, scratch.counts, source, point)
    run = scratch.counts[REPLAY_COUNT]
    scratch.counts[REPLAY_COUNT] = run + 1
    orders[REPLAY_POINT, run] = point
    orders[ENTRY, run] = entry
    orders[REPLAY_BYTES, run] = size_bytes


@part
def _close(values: Ints, lists: Ints, decisions: Bytes, here: Ints, store: Store, targets: Ints, value: int) -> int:
    """Fills ``targets``, each with the latest mark; returns how many."""
    marks = store.marks
    store.counts[MARK] += 1
    mark, count, done = store.counts[MARK], 1, 0
    targets[0] = value
    marks[value] = mark
    while done < count:
        target = targets[done]
        done += 1
        for k in range(values[target, INPUTS], values[target, INPUTS_END]):
            source = lists[k]
            if decisions[source] == RECOMPUTE and here[source, REPLAYED_AT] < 0 and marks[source] != mark:
                marks[source] = mark
                targets[count] = source
                count += 1
    return count


@part
def _entry_of(layout: Layout, store: Store, targets: Ints, count: int) -> int:
    """The store's entry of the marked targets; made where there is none."""
    key, mark = 0, store.counts[MARK]
    for i in range(count):
        key += layout.values[targets[i], KEY]
    entries, slots = store.entries, store.slots
    slot = (key ^ (key >> 20)) & (len(slots) - 1)
    while slots[slot] > 0:
        entry = slots[slot] - 1
        if entries[entry, SET_KEY] == key and entries[entry, TARGETS] == count:
            k, end = entries[entry, START], entries[entry, START] + count
            while k < end and store.marks[store.pool[k]] == mark:
                k += 1
            if k == end:
                return int(entry)
        slot = (slot + 1) & (len(slots) - 1)
    entry = store.counts[ENTRIES]
    store.counts[ENTRIES] = entry + 1
    slots[slot] = entry + 1
    entries[entry, SET_KEY] = key
    _merge(layout, store, entry, targets, count)
    return int(entry)


@part
def _merge(layout: Layout, store: Store, entry: int, targets: Ints, count: int) -> None:
    """Writes an entry of the store: what the replay of the marked ``targets`` takes."""
    values, lists, pool, marks = layout.values, layout.lists, store.pool, store.marks
    begin, mark, chosen = store.counts[POOL_END], store.counts[MARK], store.merging[CHOSEN]
    end, op_count = begin + count, 0
    first_op = len(values) + len(layout.value_bytes)
    for i in range(count):
        target = targets[i]
        pool[begin + i] = target
        for k in range(values[target, OPS], values[target, OPS_END]):
            op = lists[k]
            if marks[first_op + op] != mark:
                marks[first_op + op] = mark
                chosen[op_count] = op
                op_count += 1
        for k in range(values[target, INPUTS], values[target, INPUTS_END]):
            source = lists[k]
            if marks[source] != mark:
                marks[source] = mark
                pool[end] = source
                end += 1
    _sort(chosen, 0, op_count)
    _sort(pool, begin + count, end)
    store.entries[entry, START] = begin
    store.entries[entry, TARGETS] = count
    store.entries[entry, SOURCES] = end - begin - count
    store.entries[entry, RUNS] = op_count
    store.entries[entry, PEAK] = _peak(layout, store, targets, count, op_count)
    _time(layout, store, entry, op_count)
    if layout.facts[KIND] == AHEAD:
        for i in range(op_count):
            pool[end + i] = chosen[i]
        end += op_count
    store.counts[POOL_END] = end


@part
def _sort(numbers: Ints, begin: int, end: int) -> None:
    """Ascending; by Shell, since there are few."""
    gap = (end - begin) // 2
    while gap > 0:
        for i in range(begin + gap, end):
            number, k = numbers[i], i
            while k >= begin + gap and numbers[k - gap] > number:
                numbers[k] = numbers[k - gap]
                k -= gap
            numbers[k] = number
        gap //= 2


@part
def _peak(layout: Layout, store: Store, targets: Ints, count: int, op_count: int) -> int:
    """Most bytes that the chosen ops hold: what they make, of which targets live to the end, and their workspace."""
    ops, lists, marks, merging = layout.ops, layout.lists, store.marks, store.merging
    mark, first_value = store.counts[MARK], len(layout.values)
    for position in range(op_count):
        merging[CHANGE, position] = 0
        op = merging[CHOSEN, position]
        for k in range(ops[op, TEMPORARIES], ops[op, TEMPORARIES_END]):
            marks[first_value + lists[k]] = mark
            merging[LAST_TOUCH, lists[k]] = position
    merging[CHANGE, op_count] = 0
    for i in range(count):
        value = layout.values[targets[i], PROFILE_VALUE]
        marks[first_value + value] = mark
        merging[LAST_TOUCH, value] = op_count - 1
    live, most = 0, 0
    for position in range(op_count):
        op = merging[CHOSEN, position]
        for k in range(ops[op, OUTPUTS], ops[op, OUTPUTS_END]):
            value, last = lists[k], position
            if marks[first_value + value] == mark:
                last = merging[LAST_TOUCH, value]
            merging[CHANGE, position] += layout.value_bytes[value]
            merging[CHANGE, max(last + 1, position)] -= layout.value_bytes[value]
        live += merging[CHANGE, position]
        most = max(most, live + ops[op, WORKSPACE])
    return most


@part
def _time(layout: Layout, store: Store, entry: int, op_count: int) -> None:
    """Seconds of the chosen ops, those of their launches, and how late a thread comes to one (``replay_of``)."""
    launch_s, work_s, late_s, replay_s = 0.0, 0.0, 0.0, layout.rates[REPLAY_S]
    for position in range(op_count):
        op = store.merging[CHOSEN, position]
        behind_s = launch_s + replay_s * (position + 1) - work_s
        late_s = behind_s if position == 0 else max(late_s, behind_s)
        launch_s += layout.op_s[op, LAUNCH_S]
        work_s += layout.op_s[op, DURATION_S]
    store.entry_s[entry, OPS_S] = work_s
    store.entry_s[entry, LAUNCHES_S] = launch_s + replay_s * op_count
    store.entry_s[entry, LATE_S] = late_s

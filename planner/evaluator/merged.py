"""What decisions need back, and when (``needs_of``), and what each replay then takes (``ReplayGraph.merged``)."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Bytes, Ints

from .codes import AHEAD, RECOMPUTE, SWAP
from .compiled import compiled
from .layout import Layout, Points, Rates, Replays, Values
from .scratch import ENTRIES, MARK, NODES, POOL_END, REPLAYS, Needed, Store


@compiled
def find_needs(layout: Layout, decisions: Bytes, needed: Needed, store: Store) -> None:
    """Fills ``needed``."""
    points, values, replays = layout.points, layout.values, layout.replays
    _make_room(store)
    needed.counts[:] = 0
    needed.back_point[:] = -1
    needed.claim[:] = -1
    needed.first[:] = -1
    for value in layout.uses.order:
        point = values.first_use_point[value]
        if decisions[value] != RECOMPUTE:
            if decisions[value] == SWAP:
                _add_need(needed, value, point)
        elif needed.back_point[value] < 0:
            _add_replay(points, values, replays, layout.rates, decisions, needed, store, value, point)
    for value in replays.never:
        if decisions[value] == RECOMPUTE and needed.back_point[value] < 0:
            until = max(values.freed[value], needed.claim[value])
            for k in range(replays.input_start[value], replays.input_start[value + 1]):
                source = replays.inputs[k]
                needed.claim[source] = max(needed.claim[source], until)
    for value in range(layout.value_count):
        needed.end[value] = max(values.freed[value], needed.claim[value])


@compiled
def _make_room(store: Store) -> None:
    """Clears the store where one evaluation could fill it."""
    room = len(store.pool) - store.counts[POOL_END]
    if room < store.least_room or len(store.start) - store.counts[ENTRIES] < len(store.slots) // 4:
        store.slots[:] = 0
        store.counts[ENTRIES] = 0
        store.counts[POOL_END] = 0


@compiled
def _add_need(needed: Needed, value: int, point: int) -> None:
    node = needed.counts[NODES]
    needed.counts[NODES] = node + 1
    needed.node_point[node] = point
    needed.node_next[node] = -1
    if needed.first[value] < 0:
        needed.first[value] = node
    else:
        needed.node_next[needed.final[value]] = node
    needed.final[value] = node


@compiled
def _add_replay(
    points: Points,
    values: Values,
    replays: Replays,
    rates: Rates,
    decisions: Bytes,
    needed: Needed,
    store: Store,
    value: int,
    point: int,
) -> None:
    """The replay of ``value`` at ``point``, and of what it starts from and is not back yet."""
    count = _close(replays, decisions, needed, store, value)
    entry = _entry_of(replays, rates, store, needed.targets, count)
    run, tick, size_bytes = needed.counts[REPLAYS], points.tick[point], 0
    for target in needed.targets[:count]:
        needed.back_point[target] = point
        size_bytes += values.size_bytes[target]
        for k in range(replays.input_start[target], replays.input_start[target + 1]):
            needed.claim[replays.inputs[k]] = tick
    begin = store.start[entry] + store.targets[entry]
    for source in store.pool[begin : begin + store.inputs[entry]]:
        if decisions[source] == SWAP:
            use = values.first_use_point[source]
            if use < 0 or point < use:
                _add_need(needed, source, point)
    needed.counts[REPLAYS] = run + 1
    needed.replay_point[run] = point
    needed.entry[run] = entry
    needed.bytes[run] = size_bytes


@compiled
def _close(replays: Replays, decisions: Bytes, needed: Needed, store: Store, value: int) -> int:
    """Fills ``needed.targets``, each with the latest mark; returns how many."""
    store.counts[MARK] += 1
    mark, count, done = store.counts[MARK], 1, 0
    needed.targets[0] = value
    store.marks[value] = mark
    while done < count:
        target = needed.targets[done]
        done += 1
        for k in range(replays.input_start[target], replays.input_start[target + 1]):
            source = replays.inputs[k]
            if decisions[source] == RECOMPUTE and needed.back_point[source] < 0 and store.marks[source] != mark:
                store.marks[source] = mark
                needed.targets[count] = source
                count += 1
    return count


@compiled
def _entry_of(replays: Replays, rates: Rates, store: Store, targets: Ints, count: int) -> int:
    """The store's entry of the marked targets; made where there is none."""
    key = 0
    for target in targets[:count]:
        key += replays.key[target]
    slot = (key ^ (key >> 20)) & (len(store.slots) - 1)
    while store.slots[slot] > 0:
        entry = store.slots[slot] - 1
        if store.key[entry] == key and store.targets[entry] == count and _is_marked(store, entry):
            return entry
        slot = (slot + 1) & (len(store.slots) - 1)
    entry = store.counts[ENTRIES]
    store.counts[ENTRIES] = entry + 1
    store.slots[slot] = entry + 1
    store.key[entry] = key
    _merge(replays, rates, store, entry, targets, count)
    return entry


@compiled
def _is_marked(store: Store, entry: int) -> bool:
    """Whether all targets of an entry have the latest mark; as many have it as the entry has."""
    begin, mark = store.start[entry], store.counts[MARK]
    end = begin + store.targets[entry]
    while begin < end and store.marks[store.pool[begin]] == mark:
        begin += 1
    return bool(begin == end)


@compiled
def _merge(replays: Replays, rates: Rates, store: Store, entry: int, targets: Ints, count: int) -> None:
    """Writes an entry of the store: what the replay of the marked ``targets`` takes."""
    begin, mark = store.counts[POOL_END], store.counts[MARK]
    end, op_count = begin + count, 0
    first_op = len(replays.value_of) + len(replays.value_bytes)
    store.pool[begin:end] = targets[:count]
    for target in targets[:count]:
        for k in range(replays.op_start[target], replays.op_start[target + 1]):
            op = replays.ops[k]
            if store.marks[first_op + op] != mark:
                store.marks[first_op + op] = mark
                store.chosen[op_count] = op
                op_count += 1
        for k in range(replays.input_start[target], replays.input_start[target + 1]):
            source = replays.inputs[k]
            if store.marks[source] != mark:
                store.marks[source] = mark
                store.pool[end] = source
                end += 1
    _sort(store.chosen[:op_count])
    _sort(store.pool[begin + count : end])
    store.start[entry] = begin
    store.targets[entry] = count
    store.inputs[entry] = end - begin - count
    store.ops[entry] = op_count
    seconds = 0.0
    for op in store.chosen[:op_count]:
        seconds += replays.op_s[op]
    store.seconds[entry] = seconds
    store.peak_bytes[entry] = _peak(replays, store, targets, count, op_count)
    if rates.kind == AHEAD:
        _launch(replays, rates, store, entry, op_count)
        store.pool[end : end + op_count] = store.chosen[:op_count]
        end += op_count
    store.counts[POOL_END] = end


@compiled
def _sort(numbers: Ints) -> None:
    """Ascending; by Shell, since there are few."""
    gap = len(numbers) // 2
    while gap > 0:
        for i in range(gap, len(numbers)):
            number, k = numbers[i], i
            while k >= gap and numbers[k - gap] > number:
                numbers[k] = numbers[k - gap]
                k -= gap
            numbers[k] = number
        gap //= 2


@compiled
def _peak(replays: Replays, store: Store, targets: Ints, count: int, op_count: int) -> int:
    """Most bytes that the chosen ops hold: what they make, of which targets live to the end, and their workspace."""
    mark, first_value, change = store.counts[MARK], len(replays.value_of), store.change
    change[: op_count + 1] = 0
    for position in range(op_count):
        op = store.chosen[position]
        for k in range(replays.temporary_start[op], replays.temporary_start[op + 1]):
            value = replays.temporaries[k]
            store.marks[first_value + value] = mark
            store.last[value] = position
    for target in targets[:count]:
        store.marks[first_value + replays.value_of[target]] = mark
        store.last[replays.value_of[target]] = op_count - 1
    for position in range(op_count):
        op = store.chosen[position]
        for k in range(replays.output_start[op], replays.output_start[op + 1]):
            value, last = replays.outputs[k], position
            if store.marks[first_value + value] == mark:
                last = store.last[value]
            change[position] += replays.value_bytes[value]
            change[max(last + 1, position)] -= replays.value_bytes[value]
    live, most = 0, 0
    for position in range(op_count):
        live += change[position]
        most = max(most, live + replays.workspace_bytes[store.chosen[position]])
    return most


@compiled
def _launch(replays: Replays, rates: Rates, store: Store, entry: int, op_count: int) -> None:
    """Seconds in which a thread launches the chosen ops, and how late it comes to one of them (``replay_of``)."""
    launch_s, work_s, behind_s = 0.0, 0.0, 0.0
    for position in range(op_count):
        op = store.chosen[position]
        late_s = launch_s + rates.replay_s * (position + 1) - work_s
        behind_s = late_s if position == 0 else max(behind_s, late_s)
        launch_s += rates.launch_s[op]
        work_s += replays.op_s[op]
    store.launch_s[entry] = launch_s + rates.replay_s * op_count
    store.behind_s[entry] = behind_s

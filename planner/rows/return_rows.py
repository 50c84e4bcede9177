"""Replays before a value's own use: columns "back by this slot", and the rows "what a replay starts from is there"."""

from __future__ import annotations

from poochplan.planner.model.fluid import Early, FluidModel
from poochplan.planner.model.linear import Term

DENSE_SHARE = 0.01
"""BOUND says of values of more than this share of the bytes at each slot whether they are back."""
MANY_VALUES, DENSE_SHARE_OF_MANY = 300, 0.05
"""Where there are more values than this, only of the very largest: on ResNeXt the others took three quarters of the
time and proved nothing more."""


def add_early_returns(model: FluidModel) -> None:
    """Columns "back by this slot", and the rows "what a replay starts from is back by then"."""
    before_death = _slots_before_an_input_goes(model)
    order = sorted(model.request.candidates, key=lambda value: model.use_slot[value])
    for value in order:
        if model.is_bound and model.use_slot[value] == model.slots.count:
            continue  # never used in backward: BOUND lets it come back for nothing
        wanted = set()
        for user in model.consumers.get(value, ()):
            wanted.add(model.use_slot[user])
            wanted.update(early.slot for early in model.early.get(user, ()))
            wanted.update(before_death.get(user, ()))
        wanted = {slot for slot in wanted if slot < model.use_slot[value]}
        window = sorted(wanted | before_death.get(value, set()))[-model.window :]
        if _is_dense(model, value):
            window = sorted({*window, *range(model.slots.first_backward, model.use_slot[value])})
        _add_early_columns(model, value, window, wanted)
    for value in model.request.candidates:
        for user in model.consumers.get(value, ()):
            _add_ready_rows(model, value, user)


def _is_dense(model: FluidModel, value: int) -> bool:
    """Whether BOUND asks of every slot whether a value is back: of a large one it takes much room."""
    is_many = model.problem.value_count > MANY_VALUES
    is_large = model.resident[value] > (DENSE_SHARE_OF_MANY if is_many else DENSE_SHARE) * model.all_bytes
    return model.is_bound and is_large and value in model.recompute


def _slots_before_an_input_goes(model: FluidModel) -> dict[int, set[int]]:
    """Per recomputable value: slots of the last uses of its inputs, where these come before its own use.

    Replayed there, it needs no claim on the input. BOUND adds the last slot before the own use: what is not back by
    then has had its inputs claimed all the time.
    """
    problem, found = model.problem, dict[int, set[int]]()
    for source, users in model.consumers.items():
        slot = model.slots.at_tick(int(problem.freed[source]))
        for user in users:
            if model.slots.first_backward <= slot < model.use_slot[user]:
                found.setdefault(user, set()).add(slot)
                if model.is_bound:
                    found[user].add(model.use_slot[user] - 1)
    return found


def _add_early_columns(model: FluidModel, value: int, window: list[int], wanted: set[int]) -> None:
    linear = model.linear
    returns: list[Early] = []
    last_replayed = last_fetched = None
    for slot in window:
        replayed = linear.column(1.0) if value in model.recompute else None
        fetched = linear.column(1.0) if slot in wanted and not model.is_bound else None
        if replayed is not None and last_replayed is not None:
            linear.row([(last_replayed, 1), (replayed, -1)], high=0)
        if fetched is not None and last_fetched is not None:
            linear.row([(last_fetched, 1), (fetched, -1)], high=0)
        last_replayed, last_fetched = replayed, fetched if fetched is not None else last_fetched
        returns.append(Early(slot, replayed, fetched))
    if last_replayed is not None:
        linear.row([(last_replayed, 1), (model.recompute[value], -1)], high=0)
    if last_fetched is not None:
        linear.row([(last_fetched, 1), (model.swap[value], -1)], high=0)
    if returns:
        model.early[value] = returns


def _add_ready_rows(model: FluidModel, value: int, user: int) -> None:
    """Where ``user`` is replayed by a slot, ``value`` is kept, replayed by then, or fetched by then."""
    own = model.early.get(value, ())
    done = [(early.slot, early.replayed) for early in model.early.get(user, ())]
    done.append((model.use_slot[user], model.recompute[user]))
    for slot, is_back in done:
        if is_back is None or slot >= model.use_slot[value]:
            continue
        terms: list[Term] = [(is_back, 1.0)]
        if value in model.recompute:
            terms.append((model.recompute[value], 1.0))
        if model.is_bound:
            # The first return at or after the slot is no stricter, and a swapped value may not have left yet.
            found = next((early for early in own if early.slot >= slot and early.replayed is not None), None)
            if found is None:
                continue
            assert found.replayed is not None
            terms.append((found.replayed, -1.0))
        else:
            terms.append((model.swap[value], 1.0))
            found = next((early for early in own if early.slot == slot), None)
            if found is not None:
                terms += [(column, -1.0) for column in (found.replayed, found.fetched) if column is not None]
        model.linear.row(terms, high=1)

"""Columns and rows of the decisions: each value is kept, swapped or recomputed."""

from __future__ import annotations

from poochplan.planner.model.fluid import FluidModel

SWAP_PREFERENCE = 1e-4
"""Weight of link time in PLAN's objective, so that no value is moved for nothing."""


def add_decisions(model: FluidModel) -> None:
    problem, request, linear = model.problem, model.request, model.linear
    link = problem.link
    for value in request.candidates:
        swap_cost = recompute_cost = 0.0
        if not model.is_bound:
            out_s, in_s = problem.out_seconds(value), problem.in_seconds(value)
            slowed_s = out_s * link.interference_out / (1 + link.interference_out)
            slowed_s += in_s * link.interference_in / (1 + link.interference_in)
            swap_cost = (slowed_s + SWAP_PREFERENCE * (out_s + in_s)) / model.time_unit_s + model.swap_time(value)
            recompute_cost = SWAP_PREFERENCE * model.replay_time[value] + model.recording_time(value)
        model.swap[value] = linear.column(1.0, cost=swap_cost, integer=True)
        replay = problem.replay.replays[value]
        if replay is not None:
            model.recompute[value] = linear.column(1.0, cost=recompute_cost, integer=True)
            linear.row([(model.swap[value], 1), (model.recompute[value], 1)], high=1)
    for value in model.recompute:
        replay = problem.replay.replays[value]
        assert replay is not None
        for source in replay.inputs:
            model.consumers.setdefault(source, []).append(value)
    if request.host_bytes is not None:
        host = [(column, model.moved[value]) for value, column in model.swap.items()]
        linear.row(host, high=request.host_bytes / model.unit)

"""The simulator against cases worked out by hand."""

from __future__ import annotations

import pytest

from poochplan.formats.plan import Decision, PointActions
from poochplan.formats.profile import Kind, Link, Profile
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.schedule import Schedule, keep_all
from poochplan.planner.simulator.simulate import Simulation, simulate
from poochplan.planner.simulator.streams import Lane
from tests.planner.random_profiles import Recorder, link, random_profile, resnet_like, transformer_like, unet_like

X, Y, Z = 0, 1, 2
MB = 1_000_000
MB_ROUNDED = 1_000_448  # 1954 units of 512 bytes
KEEP, SWAP, RECOMPUTE = Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE


def three_values(the_link: Link) -> Profile:
    """Four forward ops of 1 s save x, y and z (1 MB each); three backward ops of 1 s use z, y and x.

    Save points at 1, 2 and 3 s, use points at 4, 5 and 6 s; in-core the step takes 7 s.
    """
    r = Recorder()
    (x,) = r.op("f0", [r.before(512, Kind.INPUT)], [MB], seconds=1, backward_s=0)
    (y,) = r.op("f1", [x], [MB], saves=[x], seconds=1, backward_s=1)
    (z,) = r.op("f2", [y], [MB], saves=[y], seconds=1, backward_s=1)
    r.op("f3", [z], [512], saves=[z], seconds=1, backward_s=1)
    return r.finish(the_link)


def save(index: int, **actions) -> PointActions:
    return PointActions(at="save", index=index, **actions)


def use(index: int, **actions) -> PointActions:
    return PointActions(at="use", index=index, **actions)


def run(the_link: Link, decisions: tuple[Decision, ...], *actions: PointActions, trace: bool = False) -> Simulation:
    return simulate(build_problem(three_values(the_link)), Schedule(decisions, actions), trace=trace)


def swap_x(the_link: Link) -> Simulation:
    """x leaves at 1 s, is released at the save point of y (2 s), and comes back from the first use point (4 s)."""
    out, gone, back = save(X, swap_out=(X,)), save(Y, release=(X,)), use(0, prefetch=(X,))
    return run(the_link, (SWAP, KEEP, KEEP), out, gone, back)


def test_keeping_everything_takes_the_in_core_step_and_its_peak() -> None:
    for profile in (resnet_like(3), unet_like(2), transformer_like(2), *(random_profile(seed) for seed in range(20))):
        problem = build_problem(profile) if any(p.kind == "save" for p in profile.points) else None
        if problem is None:
            continue
        simulation = simulate(problem, keep_all(problem))
        assert simulation.peak_bytes == profile.in_core_peak_bytes
        assert simulation.step_s == problem.step_s
        assert (simulation.stall_s, simulation.replay_s, simulation.interference_s) == (0, 0, 0)


def test_copies_that_fit_beside_compute_cost_nothing() -> None:
    simulation = swap_x(link(gb_per_s=0.001))  # 1 s each way: out 1..2 s, in 4..5 s, used at 6 s
    assert simulation.step_s == pytest.approx(7.0)
    assert simulation.stall_s == pytest.approx(0.0)
    assert (simulation.out_bytes, simulation.in_bytes) == (MB, MB)


def test_a_release_and_a_use_wait_for_the_rest_of_their_copy() -> None:
    # 0.5 s latency + 2 s: out 1..3.5 s, awaited from 2 s; in from 5.5 s to 8 s, awaited from 7.5 s.
    simulation = swap_x(link(gb_per_s=0.0005, latency_s=0.5))
    assert simulation.stall_s == pytest.approx(1.5 + 0.5)
    assert simulation.step_s == pytest.approx(9.0)


def test_compute_beside_a_copy_runs_slower_by_the_interference_of_its_direction() -> None:
    # Out runs 1..2 s, where compute gets 1/1.25 = 0.8 s done; in runs for 1 s, where it gets 1/2 = 0.5 s done.
    simulation = swap_x(link(gb_per_s=0.001, interference_out=0.25, interference_in=1.0))
    # At the release (work 2 s, reached at 2.2 s) the copy is over.
    assert simulation.stall_s == pytest.approx(0.0)
    assert simulation.interference_s == pytest.approx(0.2 + 0.5)
    assert simulation.step_s == pytest.approx(7.7)


def test_two_directions_at_once_share_the_link_by_the_duplex_factor() -> None:
    # z leaves at 4 s while x comes back: 1 s alone each, 2 s together at half their rate. x is awaited at 6 s.
    actions = (
        save(X, swap_out=(X,)),
        save(Y, release=(X,)),
        use(0, swap_out=(Z,), prefetch=(X,)),
        use(2, release=(Z,)),
    )
    for duplex, copies_end_s in ((1.0, 5.0), (0.5, 6.0), (0.25, 8.0)):
        simulation = run(link(gb_per_s=0.001, duplex=duplex), (SWAP, KEEP, SWAP), *actions, trace=True)
        ends = [span.end_s for span in simulation.trace if span.lane in (Lane.OUT, Lane.IN)][-2:]
        assert ends == [pytest.approx(copies_end_s)] * 2
        assert simulation.stall_s == pytest.approx(max(0.0, copies_end_s - 6))


def test_copies_in_one_direction_run_one_after_another() -> None:
    simulation = run(
        link(gb_per_s=0.0005),  # 2 s each: x out 1..3, y out 3..5 although queued at 2
        (SWAP, SWAP, KEEP),
        save(X, swap_out=(X,)),
        save(Y, swap_out=(Y,)),
        save(Z, release=(X,)),
        use(0, release=(Y,)),
        trace=True,
    )
    copies = [(span.start_s, span.end_s) for span in simulation.trace if span.lane is Lane.OUT]
    assert copies == [(pytest.approx(1), pytest.approx(3)), (pytest.approx(3), pytest.approx(5))]
    # y is fetched only when it is used, at 6 s instead of 5; then x, at 9 s.
    assert simulation.stall_s == pytest.approx(1 + 2 + 2)


def test_a_replay_takes_the_time_of_its_ops_and_waits_for_what_it_reads() -> None:
    # z is made from y by f2; y is on the host and comes back for the replay: 1 s at 4 s, then 1 s of f2.
    actions = (
        save(Y, swap_out=(Y,)),
        save(Z, release=(Y,)),
        use(0, replay=(Z,)),
    )
    simulation = run(link(gb_per_s=0.001), (KEEP, SWAP, RECOMPUTE), *actions, trace=True)
    assert (simulation.stall_s, simulation.replay_s) == (pytest.approx(1), pytest.approx(1))
    assert simulation.step_s == pytest.approx(9)
    lanes = [
        (span.lane, span.start_s, span.end_s) for span in simulation.trace if span.lane in (Lane.STALL, Lane.REPLAY)
    ]
    assert lanes == [(Lane.STALL, 4, 5), (Lane.REPLAY, 5, 6)]


def test_released_bytes_are_gone_from_the_release_and_back_from_the_prefetch() -> None:
    problem = build_problem(three_values(link()))
    kept = simulate(problem, keep_all(problem)).memory_bytes
    swapped = swap_x(link()).memory_bytes
    gone, back = problem.point_ticks[problem.save_points[Y]], problem.point_ticks[problem.use_points[0]]
    dead = problem.forward_death[X] + 1
    absent = kept - swapped
    assert (absent[: max(gone, dead)] == 0).all()
    assert (absent[max(gone, dead) : back] == MB_ROUNDED).all()
    assert (absent[back:] == 0).all()


def test_a_value_whose_own_last_use_is_over_is_held_for_a_later_replay() -> None:
    r = Recorder()
    (x,) = r.op("f0", [r.before(512, Kind.INPUT)], [MB], seconds=1, backward_s=0)
    (y,) = r.op("f1", [x], [MB], seconds=1, backward_s=1)
    r.op("late", [y], [512], saves=[y], seconds=1)  # y is used last in backward
    r.nodes.insert(0, r.nodes.pop())
    r.op("side", [x], [512], saves=[x], seconds=1)  # x is used first, and let go of
    problem = build_problem(r.finish(link()))
    at = {name: number for number, name in enumerate(problem.names)}
    saved_x, saved_y = at["f00/out1"], at["f11/out1"]
    assert problem.freed[saved_x] < problem.first_use[saved_y]
    decisions = [KEEP] * 2
    decisions[saved_y] = RECOMPUTE
    kept = simulate(problem, keep_all(problem)).memory_bytes
    replayed = simulate(problem, Schedule(tuple(decisions), (use(1, replay=(saved_y,)),))).memory_bytes
    between = slice(problem.freed[saved_x] + 1, problem.first_use[saved_y])
    # y is away and x is there instead of y
    assert (replayed[between] == kept[between]).all()


def test_the_trace_tells_when_each_tick_begins() -> None:
    problem = build_problem(three_values(link(gb_per_s=0.0005, latency_s=0.5)))
    actions = (save(X, swap_out=(X,)), save(Y, release=(X,)), use(0, prefetch=(X,)))
    simulation = simulate(problem, Schedule((SWAP, KEEP, KEEP), actions), trace=True)
    starts = simulation.tick_start_s[problem.op_ticks]
    assert starts.tolist() == [pytest.approx(t) for t in (0, 1, 3.5, 4.5, 5.5, 6.5, 8, 9)]

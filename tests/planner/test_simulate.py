"""The simulator against cases worked out by hand; which values can be recomputed, from what, and what that takes."""

from __future__ import annotations

import pytest

from poochplan.formats.occupancy import ints
from poochplan.formats.plan import Decision, PointActions
from poochplan.formats.profile import Kind, Link, Profile
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule, keep_all, recording_for
from poochplan.planner.simulator.simulate import Simulation, simulate
from poochplan.planner.simulator.streams import Lane
from tests.planner.plans import problems_of
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


SWAP_X = (SWAP, KEEP, KEEP), (save(X, swap_out=(X,)), save(Y, release=(X,)), use(0, prefetch=(X,)))
"""x leaves at 1 s, is released at the save point of y (2 s), and comes back from the first use point (4 s)."""
Plan = tuple[tuple[Decision, ...], tuple[PointActions, ...]]


def run(the_link: Link, plan: Plan = SWAP_X) -> Simulation:
    return simulate(Problem.of(three_values(the_link)), Schedule(*plan), trace=True)


def test_keeping_everything_takes_the_in_core_step_and_its_peak() -> None:
    random_steps = (profile for _, profile, _ in problems_of(random_profile, 20))
    for profile in (resnet_like(3), unet_like(2), transformer_like(2), *random_steps):
        problem = Problem.of(profile)
        simulation = simulate(problem, keep_all(problem))
        assert simulation.peak_bytes == profile.in_core_peak_bytes
        assert simulation.step_s == problem.step_s
        assert (simulation.stall_s, simulation.replay_s, simulation.interference_s) == (0, 0, 0)


Z_LEAVES_TOO = (
    (SWAP, KEEP, SWAP),
    (*SWAP_X[1][:2], use(0, swap_out=(Z,), prefetch=(X,)), use(2, release=(Z,))),
)
X_AND_Y_LEAVE = (SWAP, SWAP, KEEP), (SWAP_X[1][0], save(Y, swap_out=(Y,)), save(Z, release=(X,)), use(0, release=(Y,)))
Z_IS_REPLAYED = (KEEP, SWAP, RECOMPUTE), (save(Y, swap_out=(Y,)), save(Z, release=(Y,)), use(0, replay=(Z,)))
BY_HAND: dict[str, tuple[Link, Plan, dict[str, float], list[tuple[Lane, float, float]]]] = {
    "copies that fit beside compute cost nothing": (
        link(gb_per_s=0.001), SWAP_X, {}, [(Lane.OUT, 1, 2), (Lane.IN, 4, 5)],
    ),
    "a release and a use wait for the rest of their copy": (  # from 2 s and from 7.5 s
        link(gb_per_s=0.0005, latency_s=0.5), SWAP_X, {"stall_s": 1.5 + 0.5}, [(Lane.OUT, 1, 3.5), (Lane.IN, 5.5, 8)],
    ),
    "compute beside a copy runs slower by the interference of its direction": (  # at the release the copy is over
        link(gb_per_s=0.001, interference_out=0.25, interference_in=1.0), SWAP_X, {"interference_s": 0.2 + 0.5}, [],
    ),
    "two directions at once do not share a link of full duplex": (
        link(gb_per_s=0.001), Z_LEAVES_TOO, {}, [(Lane.OUT, 1, 2), (Lane.OUT, 4, 5), (Lane.IN, 4, 5)],
    ),
    "of half duplex they do": (
        link(gb_per_s=0.001, duplex=0.5), Z_LEAVES_TOO, {}, [(Lane.OUT, 1, 2), (Lane.OUT, 4, 6), (Lane.IN, 4, 6)],
    ),
    "and are awaited": (  # at 6 s
        link(gb_per_s=0.001, duplex=0.25), Z_LEAVES_TOO, {"stall_s": 2},
        [(Lane.OUT, 1, 2), (Lane.OUT, 4, 8), (Lane.IN, 4, 8)],
    ),
    "copies in one direction run one after another": (  # y is fetched only when it is used, at 6 s instead of 5; then x
        link(gb_per_s=0.0005), X_AND_Y_LEAVE, {"stall_s": 1 + 2 + 2},
        [(Lane.OUT, 1, 3), (Lane.OUT, 3, 5), (Lane.IN, 6, 8), (Lane.IN, 9, 11)],
    ),
    "a replay takes the time of its ops and waits for what it reads": (  # y comes back at 4 s, then 1 s of f2
        link(gb_per_s=0.001), Z_IS_REPLAYED, {"stall_s": 1, "replay_s": 1},
        [(Lane.OUT, 2, 3), (Lane.IN, 4, 5), (Lane.STALL, 4, 5), (Lane.REPLAY, 5, 6)],
    ),
}  # fmt: skip
"""A link and a plan; the seconds that are lost, and spans in the order of lanes."""


@pytest.mark.parametrize("name", BY_HAND)
def test_times_are_those_worked_out_by_hand(name: str) -> None:
    the_link, plan, lost, spans = BY_HAND[name]
    found = run(the_link, plan)
    for field in ("stall_s", "replay_s", "interference_s"):
        assert getattr(found, field) == pytest.approx(lost.get(field, 0.0), abs=1e-12)
    assert found.step_s == pytest.approx(7 + sum(lost.values()))
    for lane in dict.fromkeys(lane for lane, _, _ in spans):
        wanted = [(pytest.approx(start), pytest.approx(end)) for here, start, end in spans if here is lane]
        assert [(span.start_s, span.end_s) for span in found.trace if span.lane is lane] == wanted
    assert found.out_bytes == plan[0].count(SWAP) * MB
    assert found.in_bytes == sum(span.lane is Lane.IN for span in found.trace) * MB


def test_released_bytes_are_gone_from_the_release_and_back_from_the_prefetch() -> None:
    problem = Problem.of(three_values(link()))
    kept = simulate(problem, keep_all(problem)).memory_bytes
    swapped = run(link()).memory_bytes
    gone, back = problem.point_ticks[problem.save_points[Y]], problem.point_ticks[problem.use_points[0]]
    dead = problem.forward_death[X] + 1
    absent = kept - swapped
    assert (absent[: max(gone, dead)] == 0).all()
    assert (absent[max(gone, dead) : back] == MB_ROUNDED).all()
    assert (absent[back:] == 0).all()


def test_the_trace_tells_when_each_tick_begins() -> None:
    the_link = link(gb_per_s=0.0005, latency_s=0.5)
    starts = run(the_link).tick_start_s[Problem.of(three_values(the_link)).op_ticks]
    assert starts.tolist() == [pytest.approx(t) for t in (0, 1, 3.5, 4.5, 5.5, 6.5, 8, 9)]


KB = 1024


def problem_of(recorder: Recorder) -> Problem:
    return Problem.of(recorder.finish(link()))


def replay_of(problem: Problem, name: str):
    return problem.replay.replays[problem.names.index(name)]


def why_not(problem: Problem, name: str) -> str:
    return problem.replay.reasons[problem.names.index(name)]


def test_a_replay_runs_the_writers_of_what_it_reads_through_unsaved_values_and_starts_from_saved_ones() -> None:
    r = Recorder()
    (x,) = r.op("conv", [r.before(KB, Kind.INPUT)], [KB], seconds=1)
    (y,) = r.op("bn", [x], [KB], saves=[x], seconds=2)
    (side,) = r.op("square", [y], [KB], seconds=3)  # reads y before the ReLU
    r.op("relu_", [y], writes=[y], saves_outputs=True, seconds=4)
    (a,) = r.op("a", [y], [4 * KB])
    (b,) = r.op("b", [a], [8 * KB], workspace_bytes=512)
    (c,) = r.op("c", [b], [2 * KB])
    r.op("use", [side, c], [KB], saves=[side, c])
    problem = problem_of(r)
    found = {name.split("/")[0]: replay_of(problem, name) for name in problem.names[1:]}
    assert {name: (replay.ops, replay.inputs) for name, replay in found.items()} == {
        "bn1": ((1, 3), (0,)),  # all writers of a chain in place
        "square2": ((1, 2), (0,)),  # an older version comes from the writers, not from the entry
        "c6": ((4, 5, 6), (1,)),
    }
    assert found["square2"].seconds == 5
    both = problem.replay.merged((1, 2))  # a shared op runs once
    assert (both.ops, both.seconds) == ((1, 2, 3), 9)
    assert problem.replay.merged((3,)).peak_bytes == 4 * KB + 8 * KB + 512  # temporaries until their last reader


def test_values_that_cannot_be_recomputed_say_why() -> None:
    r = Recorder()
    data = r.before(KB, Kind.INPUT)
    (x,) = r.op("compiled", [data], [KB], opaque=True)
    (y,) = r.op("a", [x], [KB])
    r.op("use", [x, y], [KB], saves=[x, y])
    (z,) = r.op("b", [data], [KB])
    r.op("use", [z], [KB], saves=[z])
    r.op("add_", [data], writes=[data])
    problem = problem_of(r)
    assert "cannot be replayed" in why_not(problem, "compiled0/out1")
    assert why_not(problem, "a1/out1") == ""  # starts from the saved x
    assert "written in place after it was read" in why_not(problem, "b3/out1")


def test_batch_norm_may_be_replayed_although_it_writes_running_statistics() -> None:
    r = Recorder()
    mean = r.before(KB, Kind.BUFFER)
    (x,) = r.op("conv", [r.before(KB, Kind.INPUT)], [KB])
    y, _ = r.op("bn", [x], [KB], writes=[mean], saves=[x])
    r.op("conv", [y], [KB], saves=[y])
    assert replay_of(problem_of(r), "bn1/out1") is not None


def test_all_writers_of_what_a_replay_rebuilds_are_recorded() -> None:
    r = Recorder()
    (x,) = r.op("conv", [r.before(KB, Kind.INPUT)], [KB])
    r.op("exp", [x], [KB], saves_outputs=True)
    r.op("mul_", [x], writes=[x])
    r.op("square", [x], [KB], saves=[x])
    problem = problem_of(r)
    replay = replay_of(problem, "exp1/out1")
    assert replay.ops == (0, 1)
    assert problem.replay.to_record(replay.ops) == {0, 1, 2}


def test_recording_is_on_from_a_save_point_before_the_op_before_it() -> None:
    # Save points after 2, 5 and 9 ops. A switch at the point after 5 ops records from op 6 on.
    assert recording_for(ints([6, 7]), ints((2, 5, 9))) == (False, {1: "on", 2: "off"})
    assert recording_for(ints([5]), ints((2, 5, 9))) == (False, {0: "on", 2: "off"})
    assert recording_for(ints([1]), ints((2, 5, 9))) == (True, {0: "off"})


def test_windows_with_a_short_gap_are_one() -> None:
    saves = tuple(range(1, 40))
    assert recording_for(ints([10, 14]), ints(saves)) == (False, {8: "on", 14: "off"})
    assert recording_for(ints([10, 30]), ints(saves)) == (False, {8: "on", 10: "off", 28: "on", 30: "off"})

"""Which values can be recomputed, from what, and what that takes."""

from __future__ import annotations

from poochplan.formats.occupancy import ints
from poochplan.formats.profile import Kind
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.schedule import recording_for
from tests.planner.random_profiles import Recorder, link

KB = 1024


def problem_of(recorder: Recorder) -> Problem:
    return build_problem(recorder.finish(link()))


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

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


def test_a_replay_runs_through_values_that_are_not_saved_and_starts_from_saved_ones() -> None:
    r = Recorder()
    (x,) = r.op("conv", [r.before(KB, Kind.INPUT)], [KB], seconds=1)
    (h,) = r.op("norm", [x], [KB], saves=[x], seconds=2)
    (h,) = r.op("scale", [h], [KB], seconds=3)
    r.op("conv", [h], [KB], saves=[h], seconds=1)
    replay = replay_of(problem_of(r), "scale2/out1")
    assert (replay.ops, replay.inputs, replay.seconds) == ((1, 2), (0,), 5)


def test_an_in_place_chain_is_replayed_by_all_its_writers() -> None:
    r = Recorder()
    (x,) = r.op("conv", [r.before(KB, Kind.INPUT)], [KB])
    (y,) = r.op("bn", [x], [KB], saves=[x])
    r.op("relu_", [y], writes=[y], saves_outputs=True)
    replay = replay_of(problem_of(r), "bn1/out1")
    assert (replay.ops, replay.inputs) == ((1, 2), (0,))


def test_a_reader_of_an_older_version_gets_it_from_the_writers_not_from_the_entry() -> None:
    r = Recorder()
    (x,) = r.op("conv", [r.before(KB, Kind.INPUT)], [KB])
    (y,) = r.op("bn", [x], [KB], saves=[x])
    (side,) = r.op("square", [y], [KB])  # reads y before the ReLU
    r.op("relu_", [y], writes=[y], saves_outputs=True)
    r.op("use", [side], [KB], saves=[side])
    replay = replay_of(problem_of(r), "square2/out1")
    assert (replay.ops, replay.inputs) == ((1, 2), (0,))


def test_bytes_inside_a_replay_are_its_temporaries_until_their_last_reader() -> None:
    r = Recorder()
    (x,) = r.op("conv", [r.before(KB, Kind.INPUT)], [KB])
    (a,) = r.op("a", [x], [4 * KB], saves=[x])
    (b,) = r.op("b", [a], [8 * KB], workspace_bytes=512)
    (c,) = r.op("c", [b], [2 * KB])
    r.op("use", [c], [KB], saves=[c])
    problem = problem_of(r)
    merged = problem.replay.merged((problem.names.index("c3/out1"),))
    assert merged.peak_bytes == 4 * KB + 8 * KB + 512
    assert merged.inputs == (0,)


def test_replays_together_run_shared_ops_once() -> None:
    r = Recorder()
    (x,) = r.op("conv", [r.before(KB, Kind.INPUT)], [KB])
    (h,) = r.op("norm", [x], [KB], saves=[x], seconds=2)
    (a,) = r.op("a", [h], [KB], seconds=1)
    (b,) = r.op("b", [h], [KB], seconds=1)
    r.op("use", [a, b], [KB], saves=[a, b])
    problem = problem_of(r)
    both = tuple(sorted(problem.names.index(name) for name in ("a2/out1", "b3/out1")))
    assert problem.replay.merged(both).seconds == 4
    assert sum(problem.replay.merged((one,)).seconds for one in both) == 6


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

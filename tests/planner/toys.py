"""Steps of one to four values whose best plan is worked out by hand, in seconds and megabytes."""

from __future__ import annotations

from poochplan.formats.profile import Kind, Profile
from tests.planner.random_profiles import Recorder, link

MB = 1_000_000
SMALL = 512


def gb_per_s(seconds_per_mb: float) -> float:
    """The rate at which a megabyte takes so long."""
    return MB / seconds_per_mb / 1e9


def one_value(seconds_per_mb: float, *, opaque: bool = False) -> Profile:
    """x is saved at 1 s; a point at 2 s; an op that needs 5 MB of workspace; points at 3 s and, using x, at 4 s.

    In-core 5 s. Within 5.5 MB x is away during that op. Making x takes 1 s.
    """
    r = Recorder()
    (x,) = r.op("make", [r.before(SMALL, Kind.INPUT)], [MB], seconds=1, backward_s=0, opaque=opaque)
    (y,) = r.op("use", [x], [SMALL], saves=[x], seconds=1, backward_s=1)
    r.op("big", [y], [SMALL], saves=[y], seconds=1, backward_s=1, workspace_bytes=5 * MB)
    return r.finish(link(gb_per_s(seconds_per_mb)))


def two_values(seconds_per_mb: float) -> Profile:
    """x and y are saved at 2 and 4 s and used at 10 and 8 s; within 5.5 MB both are away from 6 s to 7 s.

    In-core 12 s. Neither can be replayed.
    """
    r = Recorder()
    (x,) = r.op("make", [r.before(SMALL, Kind.INPUT)], [MB], seconds=2, backward_s=0, opaque=True)
    (y,) = r.op("first", [x], [MB], saves=[x], seconds=2, backward_s=2, opaque=True)
    (z,) = r.op("second", [y], [SMALL], saves=[y], seconds=2, backward_s=2)
    r.op("big", [z], [SMALL], saves=[z], seconds=1, backward_s=1, workspace_bytes=5 * MB)
    return r.finish(link(gb_per_s(seconds_per_mb)))


def small_from_large() -> Profile:
    """y (1 MB) is made from x (4 MB) in 1 s; backward uses x first, then has 10 MB of gradients live, then uses y.

    Within 12.5 MB y is away in forward (13 MB with it). Replayed at its own use it would hold x beside the gradients
    (14 MB); replayed at the use of x it makes that 11 MB. Copies take 100 s a megabyte; in-core 14 s.
    """
    r = Recorder()
    (x,) = r.op("make", [r.before(SMALL, Kind.INPUT)], [4 * MB], seconds=2, backward_s=0, opaque=True)
    (y,) = r.op("small", [x], [MB], seconds=1, backward_s=1)
    (w,) = r.op("head", [y], [SMALL], saves=[y], seconds=1, backward_s=1)
    (u,) = r.op("wide", [w], [6 * MB], saves=[w], seconds=1, backward_s=1, workspace_bytes=2 * MB)
    (v,) = r.op("narrow", [u], [SMALL], seconds=1, backward_s=1)
    r.op("join", [v, x], [SMALL], saves=[x], seconds=1, backward_s=3)
    return r.finish(link(gb_per_s(100)))


def replay_beside_a_copy() -> Profile:
    """a (2 s to make) and b (2 s each way, no replay) are both used at 8 s, where b's way back begins.

    Within 5.5 MB both are away in forward; the best plan replays a while b comes back: 2 s for both; in-core 9 s.
    """
    r = Recorder()
    (a,) = r.op("make_a", [r.before(SMALL, Kind.INPUT)], [MB], seconds=2, backward_s=0)
    (b,) = r.op("make_b", [r.before(SMALL, Kind.INPUT)], [MB], seconds=1, backward_s=0, opaque=True)
    (c,) = r.op("both", [a, b], [SMALL], saves=[a, b], seconds=4, backward_s=1)
    r.op("big", [c], [SMALL], saves=[c], seconds=1, backward_s=0, workspace_bytes=5 * MB)
    return r.finish(link(gb_per_s(2)))


def out_through_backward() -> Profile:
    """x (4 s out, 0 s back) is saved at 1 s, forward ends at 2.75 s, and memory asks for it at 5.75 s, in backward.

    Within 8.5 MB it is away while t (4 MB) meets its gradient; its copy out ends at 5 s. In-core 8.75 s.
    """
    r = Recorder()
    (x,) = r.op("make", [r.before(SMALL, Kind.INPUT)], [MB], seconds=1, backward_s=0, opaque=True)
    (y,) = r.op("use", [x], [SMALL], saves=[x], seconds=1, backward_s=1)
    (t,) = r.op("widen", [y], [4 * MB], seconds=0.25, backward_s=1, opaque=True)
    (o,) = r.op("narrow", [t], [SMALL], saves=[t], seconds=0.25, backward_s=1)
    r.op("slow", [o], [SMALL], saves=[o], seconds=0.25, backward_s=3)
    return r.finish(link(gb_per_s(4), inward_gb_per_s=1e6))


def two_values_of_one_op() -> Profile:
    """One op of 2 s bears a and b, one of 1 s makes c of them; within 10.5 MB all three are away.

    Backward uses c first, whose replay brings all three back and runs each op once: 3 s. Copies take 1000 s a megabyte;
    in-core 9 s.
    """
    r = Recorder()
    a, b = r.op("split", [r.before(SMALL, Kind.INPUT)], [MB, MB], seconds=2, backward_s=0)
    (c,) = r.op("mul", [a, b], [MB], saves=[a, b], seconds=1, backward_s=1)
    (d,) = r.op("use", [c], [SMALL], saves=[c], seconds=1, backward_s=1)
    r.op("big", [d], [SMALL], saves=[d], seconds=2, backward_s=1, workspace_bytes=10 * MB)
    return r.finish(link(gb_per_s(1000)))

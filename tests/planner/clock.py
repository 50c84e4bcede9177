"""The clock of the oracle and of the judge of times, as values: one compute stream, two queues, the launching thread.

Written from ``docs/semantics.md``, "Time". It shares no code with the planner.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from poochplan.formats.profile import Link

Queue: TypeAlias = tuple[tuple[int, float], ...]
"""(value, seconds alone on the link that are left), first in, first out."""


class Clock(NamedTuple):
    """Wall time of the compute stream, what is still in the queues, and the time of a thread that is ahead."""

    now_s: float
    out: Queue
    inward: Queue
    thread_s: float = 0.0

    def ends(self, count: int) -> tuple[float, ...]:
        """Now, the end of each value's copy in either queue (now when there is none), and the end of both queues."""
        found = [self.now_s] * (2 * count + 3)
        for offset, queue in ((1, self.out), (count + 2, self.inward)):
            end_s = self.now_s
            for value, left_s in queue:
                end_s += left_s
                found[offset + value] = end_s
            found[offset + count] = end_s
        return tuple(found)

    def rounded(self) -> tuple[Queue, Queue]:
        """The queues, rounded so that equal ones compare equal."""
        out, inward = (tuple((value, round(s, 13)) for value, s in queue) for queue in (self.out, self.inward))
        return out, inward


def is_plain(link: Link) -> bool:
    """Whether copies slow neither each other nor compute."""
    return link.duplex == 1.0 and link.interference_out == 0.0 and link.interference_in == 0.0


def run(link: Link, clock: Clock, work_s: float) -> Clock:
    """Computes for ``work_s`` seconds of undisturbed work."""
    while work_s > 0.0:
        slow = 1.0 + (link.interference_out if clock.out else 0.0) + (link.interference_in if clock.inward else 0.0)
        after = _until(link, clock, work_s * slow)
        passed_s = after[1]
        work_s = 0.0 if passed_s >= work_s * slow else work_s - passed_s / slow
        clock = after[0]
    return clock


def take(link: Link, is_compute: bool, clock: Clock, seconds: float) -> Clock:
    """The launching thread works: the compute stream itself does, or has nothing more to do before it is done."""
    if is_compute:
        return run(link, clock, seconds)
    clock = clock._replace(thread_s=clock.thread_s + seconds)
    while clock.now_s < clock.thread_s:
        clock = _until(link, clock, clock.thread_s - clock.now_s)[0]
    return clock


def wait(link: Link, clock: Clock, value: int, *, is_out: bool) -> Clock:
    """Waits for a value's copy to the host or back, if it is on its way."""
    while any(queued == value for queued, _ in (clock.out if is_out else clock.inward)):
        clock = _until(link, clock, float("inf"))[0]
    return clock


def _until(link: Link, clock: Clock, limit_s: float) -> tuple[Clock, float]:
    """The clock after ``limit_s`` or at the next end of a copy, and the seconds that passed."""
    rate = link.duplex if clock.out and clock.inward else 1.0
    heads = [queue[0][1] / rate for queue in (clock.out, clock.inward) if queue]
    passed_s = min([limit_s, *heads])
    out, inward = _moved(clock.out, passed_s, rate), _moved(clock.inward, passed_s, rate)
    return Clock(clock.now_s + passed_s, out, inward, clock.thread_s), passed_s


def _moved(queue: Queue, passed_s: float, rate: float) -> Queue:
    if not queue:
        return queue
    (value, left_s), *rest = queue
    if left_s / rate <= passed_s:
        return tuple(rest)
    return ((value, left_s - passed_s * rate), *rest)

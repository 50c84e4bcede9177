"""Ways to take a profile of one value: without memory for its bytes, without memory with times, and of real steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from poochplan.formats.profile import Link, Profile
from poochplan.planner.whatif import MEASURED, for_machine
from poochplan.profiler.fake.fake import building
from poochplan.profiler.link.cache import cached_link
from poochplan.profiler.profiling import profile

from .family import Family

Say = Callable[[str], None]
Take = Callable[[int], Profile]
BYTES_ALONE = "h200"
"""Roofline of profiles that are asked for bytes alone, which no roofline changes."""
ITERATIONS = 2
"""Timed steps of a real profile: enough for a plan, and few enough to look at several values."""


@dataclass(frozen=True)
class Machine:
    """The machine that is asked about."""

    budget_bytes: int
    """What the step may take of its memory."""
    roofline: str | None = None
    link: str | float | None = None
    compute_scale: float | None = None
    spill_dir: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this one, so that what is found can be run."""
        return self.roofline is None and self.link in (None, MEASURED) and self.compute_scale in (None, 1)

    def measured_link(self) -> Link | None:
        """This machine's link, measured once; None where a roofline brings its own."""
        return None if self.roofline is not None else cached_link(torch.device("cpu"), self.spill_dir)[0]


def bytes_alone(family: Family, machine: Machine, say: Say) -> Take:
    """Profiles without memory by a roofline; where it is not that of the machine, only their bytes mean something."""

    def take(value: int) -> Profile:
        say(f"{family.parameter} {value}, without memory")
        return _faked(family, value, machine, machine.roofline or BYTES_ALONE, None)

    return take


def with_times(family: Family, machine: Machine, say: Say) -> Take:
    """Profiles without memory, with the times of the machine: each distinct op is run by itself on this one."""

    def take(value: int) -> Profile:
        say(f"{family.parameter} {value}, without memory, each op timed by itself")
        return _faked(family, value, machine, machine.roofline, machine.measured_link())

    return take


def of_real_steps(family: Family, machine: Machine, say: Say) -> Take:
    """Profiles of steps that run here, in-core where that fits this machine's memory, and else swapping."""

    def take(value: int) -> Profile:
        say(f"{family.parameter} {value}, real steps")
        workload = family.workload(value)
        return profile(
            workload.step,
            model=workload.model,
            optimizer=workload.optimizer,
            workload=family.name,
            mode="auto",
            iterations=ITERATIONS,
            spill_dir=machine.spill_dir,
            link=machine.measured_link(),
        )

    return take


def _faked(family: Family, value: int, machine: Machine, roofline: str | None, link: Link | None) -> Profile:
    with building():
        workload = family.workload(value)
    found = profile(
        workload.step,
        model=workload.model,
        optimizer=workload.optimizer,
        workload=family.name,
        mode="fake",
        roofline=roofline,
        link=link,
    )
    return for_machine(found, link=machine.link, compute_scale=machine.compute_scale)

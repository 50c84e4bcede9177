"""A workload's values of one whole-number parameter, with their profiles, plans and steps; and the ladder of values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from poochplan import verify
from poochplan.errors import InfeasibleError, UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.arena.reserved import in_core_bytes
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.whatif import MEASURED, for_machine
from poochplan.profiler.fake.fake import building
from poochplan.profiler.link import cached_link
from poochplan.profiler.profiling import profile
from poochplan.profiler.request import ProgressCallback, checked_device
from poochplan.workload import Workload, load_workload, parameter_values, parse_override

from .largest import NEIGHBOURS, Found, largest

Target = str | Callable[..., Workload]
"""The argument of :func:`poochplan.workload.load_workload`: a name, a TOML file, a function's name, or the function
itself."""
BYTES_ALONE = "h200"
"""The roofline of profiles that are only used for bytes, which no roofline changes."""
ITERATIONS = 2
"""Timed steps of a real profile: enough for a plan, and few enough to look at several values."""
MOST_RUNGS = 8
"""Most powers of two in a ladder; of more, this many are taken evenly."""


@dataclass(frozen=True)
class Family:
    """Workloads that differ in one whole-number parameter."""

    target: Target
    name: str
    """The workload's short name."""
    parameter: str
    own: int | None
    """The workload's default value; None if it has none."""
    settings: Mapping[str, Any]
    """Settings of other parameters, as ``--set`` gives them."""
    assumed: Mapping[str, int]
    """Whole-number parameters that are not varied: sizes of images, sequences and layers."""
    seed: int = 0

    @property
    def batch(self) -> int:
        """Samples of a step, if another parameter gives them; else 1."""
        return next((value for name, value in self.assumed.items() if _is_batch(name)), 1)

    def workload(self, value: int) -> Workload:
        """The seeded workload with that value; raises what ``load_workload`` raises."""
        verify.seed_everything(self.seed)
        return load_workload(self.target, {**self.settings, self.parameter: value}).workload

    def where(self, value: int) -> torch.device:
        """Where the workload builds its model; raises what building it with that value raises."""
        with building():
            return checked_device(self.workload(value).model, None, None, 0)

    def items(self, value: int) -> int:
        """Number of items that a step processes, in units of :attr:`unit`."""
        return value * self.batch if self.is_comparable else self.batch

    @property
    def unit(self) -> str:
        """The unit of throughput: samples, positions of sequences, or steps if the number of samples is unknown."""
        if _is_length(self.parameter):
            return "positions"
        return "samples" if self.batch > 1 or _is_batch(self.parameter) else "steps"

    @property
    def is_comparable(self) -> bool:
        """Whether items per second of two values show which is better: the items are alike, and more items are more
        work.
        """
        return _is_batch(self.parameter) or _is_length(self.parameter)


def family_of(target: Target, parameter: str, settings: Mapping[str, Any] | None = None, seed: int = 0) -> Family:
    """The workloads of ``target`` that differ in ``parameter``; builds none of them.

    An unknown parameter is left to ``load_workload``, which names the known ones.

    Raises
    ------
    UsageError
        The parameter is set as well, or its value is no whole number; or the workload is not found.
    """
    given = {name: parse_override(value) for name, value in (settings or {}).items()}
    if parameter in given:
        raise UsageError(
            f"{parameter}: expected it to be varied alone, found it set to {given[parameter]!r} as well; "
            "leave that out, or give the range of values to search"
        )
    name, own = parameter_values(target)
    known = own | given
    if own.get(parameter) is not None and not _is_whole(own[parameter]):
        others = ", ".join(name for name, value in known.items() if _is_whole(value)) or "none"
        raise UsageError(
            f"{parameter}: expected a parameter that is a whole number, found {own[parameter]!r} of type "
            f"{type(own[parameter]).__name__}; those of {name} are: {others}"
        )
    assumed = {key: value for key, value in known.items() if _is_whole(value) and key not in (parameter, "seed")}
    return Family(target, name, parameter, own.get(parameter), settings or {}, assumed, seed)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_batch(parameter: str) -> bool:
    return "batch" in parameter


def _is_length(parameter: str) -> bool:
    return "length" in parameter


@dataclass(frozen=True)
class Machine:
    """The machine that the question is about."""

    budget_bytes: int
    """Bytes of its memory that the step may take."""
    roofline: str | None = None
    link: str | float | None = None
    compute_scale: float | None = None
    spill_dir: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, so that the result can be run."""
        return self.roofline is None and self.link in (None, MEASURED) and self.compute_scale in (None, 1)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One value: its memory, and the figures of its plan within the memory."""

    value: int
    in_core_peak_bytes: int
    smallest_peak_bytes: int
    """No plan has a smaller peak."""
    fits: bool = False
    """Whether it has a plan within the memory and within ``max_overhead``."""
    in_core_step_s: float | None = None
    """This and all below: None if there is no plan within the memory."""
    step_s: float | None = None
    overhead: float | None = None
    bound_overhead: float | None = None
    """Proven: no plan within the memory has a smaller overhead. None if nothing is proven."""
    items_per_s: float | None = None
    """Throughput of the planned step, in units of ``Fit.unit``."""
    is_measured: bool = False
    """Whether real steps were profiled; otherwise the profile was taken without memory."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    value: int
    steps: int
    peak_bytes: int | None
    """Most bytes of any metered step, of what the budget covers."""
    is_within: bool
    """Whether each step stayed within the budget."""
    is_bitwise: bool | None
    """Whether losses, gradients, buffers and parameters equal those of in-core steps; None if in-core does not fit."""
    difference: str | None
    """The first tensor that differs."""


@dataclass(eq=False)
class Probes:
    """Profiles of values, taken in one way, with their sizes and plans. State: all of these so far, and refusals."""

    family: Family
    machine: Machine
    say: ProgressCallback
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Of each plan's search, as for :func:`poochplan.plan`."""
    most_overhead: float | None = None
    bytes_alone: bool = True
    """Whether profiles are without memory by a roofline: if it is not that of the machine, only their bytes are
    meaningful. Otherwise they are of steps that run here, in-core if that fits this machine's memory, else swapping;
    for another machine without memory, each distinct op run by itself on this one."""
    first: Probes | None = None
    """Those that are asked first, and that know which values the workload takes."""

    def __post_init__(self) -> None:
        self.profile = cache(self._profiled)
        """The profile of a value; raises what building or profiling it raises."""
        self.least_bytes = cache(lambda value: smallest_budget(self.profile(value)))
        """No plan of a value has a smaller peak."""
        self.plan = cache(lambda value: plan(self.profile(value), self.machine.budget_bytes, **self.limits))
        """The plan of a value within the budget; raises ``InfeasibleError`` if it has none."""
        self.refusals: dict[int, Exception] = {}
        """Values that the workload does not take, with its error."""

    def _profiled(self, value: int) -> Profile:
        machine, family = self.machine, self.family
        what, how = "without memory, each op timed by itself", dict[str, Any](mode="fake")
        if self.bytes_alone:
            what, how["roofline"] = "without memory", machine.roofline or BYTES_ALONE
        elif machine.is_here:
            what, how = "real steps", {"mode": "auto", "iterations": ITERATIONS, "spill_dir": machine.spill_dir}
        self.say(f"{family.parameter} {value}, {what}")
        is_fake = how["mode"] == "fake"
        with building() if is_fake else contextlib.nullcontext():
            workload = family.workload(value)
        where = checked_device(workload.model, None, None, 0)
        # Measured once for this machine; a roofline has its own.
        link = None if self.bytes_alone else cached_link(where, machine.spill_dir)[0]
        found = profile(
            workload.step, model=workload.model, optimizer=workload.optimizer, link=link, workload=family.name, **how
        )
        return for_machine(found, link=machine.link, compute_scale=machine.compute_scale) if is_fake else found

    def takes(self, value: int) -> bool:
        """Whether the workload takes the value."""
        if self.first is not None:
            return self.first.takes(value)
        if value not in self.refusals:
            try:
                self.profile(value)
            except Exception as error:  # a workload may raise anything for a value that it does not support
                self.refusals[value] = error
        return value not in self.refusals

    def smallest(self, value: int) -> int | None:
        """Bytes of the smallest possible peak; None if the workload does not take the value."""
        return self.least_bytes(value) if self.takes(value) else None

    def in_core(self, value: int) -> int | None:
        """Bytes of what a budget covers with everything kept; None if the workload does not take the value."""
        return in_core_bytes(self.profile(value)) if self.takes(value) else None

    def side(self, value: int) -> float | None:
        """On which side of any limit the value is, for a search that only :meth:`fits` decides."""
        return None if not self.takes(value) else -math.inf if self.fits(value) else math.inf

    def largest(
        self, size: Callable[[Probes, int], int | None], start: int, low: int, high: int, neighbours: int = NEIGHBOURS
    ) -> Found:
        """The largest value whose size fits. Profiles that decide here begin from what the first ones find, because
        they may know more bytes, such as memory inside ops.
        """
        if self.first is not None:
            found = self.first.largest(size, start, low, high, neighbours)
            if found.value is None or not self.machine.is_here:
                return found
            start, neighbours = found.value, 1
        return largest(partial(size, self), self.machine.budget_bytes, start, low, high, neighbours)

    def fits(self, value: int) -> bool:
        """Whether a plan was found within the budget and the requested overhead."""
        made = self._made(value)
        if made is None or made.covered_bytes > self.machine.budget_bytes:
            return False
        return self.most_overhead is None or made.prediction.overhead <= self.most_overhead

    def rung(self, value: int) -> Rung:
        """The value's rung; raises what profiling it raises."""
        figures: dict[str, Any] = {}
        if (made := self._made(value)) is not None:
            step_s = made.prediction.step_s
            figures = {name: getattr(made.prediction, name) for name in ("in_core_step_s", "step_s", "overhead")} | {
                "fits": self.fits(value),
                "bound_overhead": made.bound_overhead,
                "items_per_s": self.family.items(value) / step_s if step_s > 0 else None,
            }
        return Rung(
            value=value,
            in_core_peak_bytes=self.profile(value).in_core_peak_bytes,
            smallest_peak_bytes=self.least_bytes(value),
            is_measured=self.machine.is_here,
            **figures,
        )

    def tried(self, value: int, steps: int) -> Trial:
        """Runs steps under the plan and, if in-core fits this machine, the same ones without it; raises what ``apply``
        raises.
        """
        family, made = self.family, self.plan(value)
        self.say(f"{family.parameter} {value}, {steps} steps under its plan")
        build, spill_dir = partial(family.workload, value), self.machine.spill_dir
        how: dict[str, Any] = {"steps": steps, "timed_steps": 0, "seed": family.seed, "spill_dir": spill_dir}
        compared = verify.check(build, made, **how) if self.profile(value).mode == "run" else None
        run = compared.planned if compared else verify.run_planned(build, made, record=False, **how)
        taken = (step.reserved_bytes if made.on == "reserved" else step.peak_bytes for step in run.step_reports)
        peak_bytes = max((one for one in taken if one is not None), default=None)
        return Trial(
            value=value,
            steps=steps,
            peak_bytes=peak_bytes,
            is_within=(peak_bytes or 0) <= made.budget_bytes,
            is_bitwise=compared.difference is None if compared else None,
            difference=compared.difference if compared else None,
        )

    def _made(self, value: int) -> Plan | None:
        try:
            return self.plan(value) if self.least_bytes(value) <= self.machine.budget_bytes else None
        except InfeasibleError:
            return None


def ladder_values(in_core: int | None, largest: int, smallest: int) -> tuple[int, ...]:
    """The largest in-core value, powers of two above it, and the largest value; from the smallest value if none is
    in-core.
    """
    first = smallest if in_core is None else in_core
    powers = [1 << exponent for exponent in range(largest.bit_length()) if first < 1 << exponent < largest]
    if len(powers) > MOST_RUNGS:
        powers = [powers[index * (len(powers) - 1) // (MOST_RUNGS - 1)] for index in range(MOST_RUNGS)]
    return tuple(sorted({first, *powers, largest}))

"""fit(): the largest value of a workload's parameter that trains in a given memory, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from poochplan.errors import InfeasibleError, UsageError, named_line
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.arena.reserved import is_reserved_known
from poochplan.profiler.fake.roofline import parse_roofline
from poochplan.profiler.request import ProgressCallback
from poochplan.units import format_bytes, memory_and_margin

from .largest import Found, largest
from .probes import Machine, Probes, Rung, Target, Trial, family_of, ladder_values

MOST_DOUBLINGS = 20
"""Without an upper end the search stops at this many doublings of its first value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """The largest value that trains in a given memory, and the figures of values up to it.

    Bytes and seconds are for one step. ``plan`` and ``profile`` belong to the value found.
    """

    workload: str
    parameter: str
    assumed: Mapping[str, int]
    """The workload's other whole-number parameters, the sizes that the answer is for."""
    unit: str
    """What throughput counts: samples, positions of sequences, or steps."""
    memory_bytes: int
    margin_bytes: int
    """Part of the memory that the step must leave free."""
    most_overhead: float | None
    """``max_overhead``, a share of the in-core step; None for any."""
    value: int
    in_core_value: int | None
    """The largest value that fits with everything kept, by profiles without memory; None if there is none."""
    following: Rung | None
    """The next value, which does not fit; None if the range ends before it."""
    best: int | None
    """The value of the ladder with the most items per second; None if items of two values differ in work."""
    rungs: tuple[Rung, ...]
    """The ladder, from small to large."""
    plan: Plan
    profile: Profile
    trial: Trial | None
    """Steps of the value that ran here; None for another machine."""
    notes: tuple[str, ...]

    @property
    def budget_bytes(self) -> int:
        """The memory minus the margin."""
        return self.memory_bytes - self.margin_bytes

    @property
    def times_in_core(self) -> float | None:
        """The value found over the largest in-core one."""
        return None if not self.in_core_value else self.value / self.in_core_value


def fit(
    workload: Target,
    vary: str,
    device_memory: str | int | None = None,
    *,
    roofline: str | None = None,
    link: str | float | None = None,
    compute_scale: float | None = None,
    margin: str | int = 0,
    max_overhead: float | None = None,
    settings: Mapping[str, Any] | None = None,
    low: int = 1,
    high: int | None = None,
    time_limit_s: float = 20.0,
    gap: float = 0.005,
    evaluations: int | None = None,
    steps: int = 2,
    seed: int = 0,
    spill_dir: str | None = None,
    progress: ProgressCallback | None = None,
) -> Fit:
    """The largest value of one whole-number parameter with which a workload trains in a given memory.

    Profiles without memory tell what each value takes. Lines through these sizes, and bisection, find the value. The
    next few are then tried one by one, because not every parameter is monotonic. Without ``roofline``, ``link`` and
    ``compute_scale`` the machine is this one: real profiles then decide, and steps of the value run under its plan.

    Parameters
    ----------
    workload: a name, TOML file or function as for ``pooch profile``, or the function itself.
    vary: the parameter, such as ``"batch_size"``, ``"layers"``, ``"sequence_length"`` or ``"image_size"``.
    device_memory: bytes, or text such as ``"16GiB"``; by default that of ``roofline``.
    roofline: the device, ``"v100"``, ``"a100"``, ``"h100"``, ``"h200"``, ``"p100"``, ``"titan-x"``, ``"cpu-core"`` or
        ``"FLOPS,BYTES"`` per second.
    link, compute_scale: of the machine, as for ``pooch plan``.
    margin: part of the memory that the step must leave free.
    max_overhead: the largest overhead of the plan, as a share of the in-core step: 0.3 is 30%.
    settings: values of other parameters; text is read like ``--set``.
    low, high: the range to search; without ``high`` it ends after 20 doublings.
    time_limit_s, gap, evaluations: limits of each plan's search, as for :func:`poochplan.plan`.
    steps: how many steps of the value run, if the machine is this one; 0 for none.
    seed: of all generators, before each build.
    spill_dir: directory of the spill file of these steps.
    progress: called with a line of text at each stage.

    Raises
    ------
    UsageError
        An argument is invalid; the parameter is unknown or not a whole number.
    PoochError
        The workload refuses the first value that is tried.
    InfeasibleError
        The smallest value does not fit, even with its smallest possible peak.
    """
    memory_bytes, margin_bytes = _memory(device_memory, margin, roofline)
    machine = Machine(memory_bytes - margin_bytes, roofline, link, compute_scale, spill_dir)
    if low < 1 or (high is not None and high < low):
        raise UsageError(f"range: expected values from 1 up, found {low} to {high}; name a smaller first one")
    family, say = family_of(workload, vary, settings, seed), progress or (lambda _: None)
    limits = {"time_limit_s": time_limit_s, "gap": gap, "evaluations": evaluations}
    start = max(low, family.own or low)
    start = min(start, high or start)
    judge = Probes(family, machine, say, limits, max_overhead)
    if not roofline:
        is_quick = not machine.is_here or family.where(start).type == "cpu"
        judge = replace(judge, bytes_alone=False, first=judge if is_quick else None)
    found, in_core = _searched(judge, start, low, high or start << MOST_DOUBLINGS)
    value = found.value
    assert value is not None, "an error was raised"
    rungs = tuple(judge.rung(one) for one in ladder_values(in_core, value, min(start, value)) if judge.takes(one))
    rates = [(rung.items_per_s, rung.value) for rung in rungs if rung.items_per_s is not None and rung.fits]
    return Fit(
        workload=family.name,
        parameter=vary,
        assumed=family.assumed,
        unit=family.unit,
        memory_bytes=memory_bytes,
        margin_bytes=margin_bytes,
        most_overhead=max_overhead,
        value=value,
        in_core_value=in_core,
        following=None if found.following is None else judge.rung(found.following),
        best=max(rates)[1] if rates and family.is_comparable else None,
        rungs=rungs,
        plan=judge.plan(value),
        profile=judge.profile(value),
        trial=judge.tried(value, steps) if machine.is_here and steps else None,
        notes=tuple(_notes(judge.first or judge, found, high)),
    )


def _searched(judge: Probes, start: int, low: int, high: int) -> tuple[Found, int | None]:
    """The largest value that fits, and the largest that does in-core, if any.

    Raises ``InfeasibleError`` if the smallest value does not fit, and what the first value raises.
    """
    (judge.first or judge).profile(start)
    found, in_core = judge.largest(Probes.smallest, start, low, high), None
    if found.value is not None:
        in_core = judge.largest(Probes.in_core, start, low, found.value, 1).value
        if judge.most_overhead is not None or is_reserved_known(judge.profile(found.value)):  # only a plan tells
            found = largest(judge.side, 0, in_core or start, low, found.value)
    if found.value is None:
        raise _infeasible(judge, found.following or start)
    return found, in_core


def _infeasible(judge: Probes, smallest: int) -> InfeasibleError:
    """The error if nothing fits: the memory of the smallest value."""
    parameter, budget_bytes = judge.family.parameter, judge.machine.budget_bytes
    least_bytes = judge.least_bytes(smallest)
    budget = f"{budget_bytes} bytes ({format_bytes(budget_bytes)})"
    text = (
        f"no {parameter} fits {budget}: expected at least {least_bytes} bytes ({format_bytes(least_bytes)}), the "
        f"smallest possible peak of {parameter} {smallest}; name more memory, or make the workload smaller elsewhere"
    )
    made = judge.plan(smallest) if least_bytes <= budget_bytes else None
    if made is not None and made.covered_bytes > budget_bytes:
        least_bytes = made.covered_bytes
        text = (
            f"no {parameter} {smallest} was found within {budget} of reserved bytes: the fewest that were found are "
            f"{least_bytes} bytes ({format_bytes(least_bytes)}); name more memory, or make the workload smaller "
            "elsewhere"
        )
    elif made is not None and judge.most_overhead is not None:
        text = (
            f"no {parameter} has a plan within {budget} at an overhead of at most {judge.most_overhead:.1%}: the "
            f"smallest, {smallest}, takes {made.prediction.overhead:+.1%}; allow more overhead, or name more memory"
        )
    return InfeasibleError(text, smallest_budget_bytes=least_bytes)


def _notes(quick: Probes, found: Found, high: int | None) -> Iterator[str]:
    name, value = quick.family.parameter, found.value or 0
    if found.misfits:
        yield f"{name} is not monotonic: {', '.join(map(str, found.misfits))} do not fit, and {value} does"
    if found.following is not None:
        return
    refused = min((one for one in quick.refusals if one > value), default=None)
    if refused is not None:
        yield f"the workload takes no {name} of {refused}: {named_line(quick.refusals[refused])}"
    elif high is None:
        yield f"every {name} up to {value} fits; larger ones were not asked for"
    else:
        yield f"the range ends at {high}: larger ones were not tried, and may fit too"


def _memory(device_memory: str | int | None, margin: str | int, roofline: str | None) -> tuple[int, int]:
    """Bytes of the machine's memory and of the margin; raises ``UsageError``."""
    known_bytes = 0 if roofline is None else parse_roofline(roofline).memory_bytes
    if device_memory is None and not known_bytes:
        raise UsageError("device memory: expected a size such as 16GiB, found none; name it")
    given = known_bytes if device_memory is None else device_memory
    return memory_and_margin(given, margin, ("device memory", "margin"))

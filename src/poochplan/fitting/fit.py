"""fit(): the largest value of a workload's parameter that trains in a given memory, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from poochplan.errors import InfeasibleError, UsageError, named_line
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.profiler.fake.roofline import parse_roofline
from poochplan.profiler.request import ProgressCallback
from poochplan.units import format_bytes, parse_bytes

from .family import Family, Machine, Target, Trial, bytes_alone, family_of, tried, with_times
from .largest import NEIGHBOURS, Found, Gait, aimed, largest
from .probes import Probes, Rung, bytes_of, ladder_values, rung_at

MOST_DOUBLINGS = 20
"""Without an upper end the search stops at this many doublings of its first value."""
Fits = Callable[[Probes, int], bool | None]
SizeOf = Callable[[Probes, int], int | None]


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

    Profiles without memory tell what each value takes. Doubling and bisection find the value. The next few are then
    tried one by one, because not every parameter is monotonic. Without ``roofline``, ``link`` and ``compute_scale``
    the machine is this one: real profiles then decide, and some steps of the value run under its plan.

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
    machine, memory_bytes, margin_bytes = _machine(device_memory, margin, roofline, link, compute_scale, spill_dir)
    if low < 1 or (high is not None and high < low):
        raise UsageError(f"range: expected values from 1 up, found {low} to {high}; name a smaller first one")
    family = family_of(workload, vary, settings, seed)
    limits = {"time_limit_s": time_limit_s, "gap": gap, "evaluations": evaluations}
    search = _Search(family, machine, limits, max_overhead, low, high, progress or (lambda _: None))
    found, judge, is_here = search.run(), search.judge, machine.is_here
    assert found.value is not None
    trial = None
    if is_here and steps:
        in_core = judge.profile(found.value).mode == "run"
        trial = tried(family, found.value, judge.plan(found.value), steps, in_core, spill_dir, search.say)
    values = ladder_values(search.in_core, found.value, min(search.start, found.value))
    taken = [value for value in values if judge.has_plan(value) is not None]
    rungs = tuple(rung_at(family, value, judge, is_measured=is_here) for value in taken)
    after = found.following
    rates = [(rung.items_per_s, rung.value) for rung in rungs if rung.items_per_s is not None and rung.fits]
    return Fit(
        workload=family.name,
        parameter=vary,
        assumed=family.assumed,
        unit=family.unit,
        memory_bytes=memory_bytes,
        margin_bytes=margin_bytes,
        most_overhead=max_overhead,
        value=found.value,
        in_core_value=search.in_core,
        following=None if after is None else bytes_of(after, judge, is_measured=is_here),
        best=max(rates)[1] if rates and family.is_comparable else None,
        rungs=rungs,
        plan=judge.plan(found.value),
        profile=judge.profile(found.value),
        trial=trial,
        notes=tuple(search.notes(found)),
    )


class _Search:
    """One search. State: the profiles and plans that were made, and the largest in-core value."""

    def __init__(
        self,
        family: Family,
        machine: Machine,
        limits: Mapping[str, Any],
        most_overhead: float | None,
        low: int,
        high: int | None,
        say: ProgressCallback,
    ) -> None:
        self.family, self.machine, self.say, self.most_overhead = family, machine, say, most_overhead
        self.start = max(low, family.own or low) if high is None else min(max(low, family.own or low), high)
        self.low, self.high = low, self.start << MOST_DOUBLINGS if high is None else high
        self.is_open = high is None
        budget_bytes = machine.budget_bytes
        self.quick = Probes(bytes_alone(family, machine, say), budget_bytes, limits, most_overhead)
        self.judge = self.quick
        """The profiles that decide: those of real steps, of another machine's times, or of its roofline."""
        if not machine.roofline:
            take, exists = with_times(family, machine, say), lambda value: self.quick.has_plan(value) is not None
            is_quick = not machine.is_here or family.where(self.start).type == "cpu"
            self.judge = Probes(take, budget_bytes, limits, most_overhead, exists=exists if is_quick else None)
            self.quick = self.quick if is_quick else self.judge
        self.in_core: int | None = None

    def run(self) -> Found:
        """The value by profiles without memory. If the machine is this one, profiles of real steps then decide.

        Raises ``InfeasibleError`` if the smallest value does not fit, and what the first value raises.
        """
        self.quick.least_bytes(self.start)
        found = self._largest(Probes.has_plan, Probes.smallest, self.high, NEIGHBOURS)
        if found.value is None:
            raise self._infeasible(found)
        self.in_core = self._largest(Probes.in_core, Probes.in_core_peak, found.value, 1).value
        if self.judge.is_searched(found.value):
            first = min(self.in_core or self.start, found.value)
            found = largest(self.judge.fits, first, self.low, found.value)
            if found.value is None:
                raise self._infeasible(found)
        return found

    def _largest(self, fits: Fits, size_bytes: SizeOf, high: int, neighbours: int) -> Found:
        """The largest value that fits. The quick profiles search from where the bytes of a few values suggest; the
        deciding profiles continue from their result, because they may know more bytes, such as memory inside ops.
        """
        budget_bytes, quick, judge = self.machine.budget_bytes, self.quick, self.judge
        guess = aimed(partial(size_bytes, quick), budget_bytes, min(self.start, high), self.low, high)
        found = largest(partial(fits, quick), guess, self.low, high, Gait.STEP, neighbours)
        if judge is quick or found.value is None or not self.machine.is_here:
            return found
        known, told = size_bytes(judge, found.value), size_bytes(quick, found.value)
        guess = found.value
        if known is not None and told and known > budget_bytes:
            more = known / told

            def expected(value: int) -> int | None:
                size = size_bytes(quick, value)
                return None if size is None else int(size * more)

            guess = aimed(expected, budget_bytes, guess, self.low, guess)
        return largest(partial(fits, judge), guess, self.low, high, Gait.STEP, 1)

    def _infeasible(self, found: Found) -> InfeasibleError:
        """The error if nothing fits: the memory of the smallest value."""
        probes = self.judge
        smallest = found.following if found.following is not None else self.start
        name, peak_bytes = f"{self.family.parameter} {smallest}", probes.least_bytes(smallest)
        budget = f"{probes.budget_bytes} bytes ({format_bytes(probes.budget_bytes)})"
        if peak_bytes <= probes.budget_bytes < probes.plan(smallest).covered_bytes:
            least_bytes = probes.plan(smallest).covered_bytes
            return InfeasibleError(
                f"no {name} was found within {budget} of reserved bytes: the fewest that were found are {least_bytes} "
                f"bytes ({format_bytes(least_bytes)}); name more memory, or make the workload smaller elsewhere",
                smallest_budget_bytes=least_bytes,
            )
        if peak_bytes <= probes.budget_bytes and self.most_overhead is not None:
            least = probes.plan(smallest).prediction.overhead
            return InfeasibleError(
                f"no {self.family.parameter} has a plan within {budget} at an overhead of at most "
                f"{self.most_overhead:.1%}: the smallest, {smallest}, takes {least:+.1%}; allow more overhead, or name "
                "more memory",
                smallest_budget_bytes=peak_bytes,
            )
        return InfeasibleError(
            f"no {self.family.parameter} fits {budget}: expected at least {peak_bytes} bytes "
            f"({format_bytes(peak_bytes)}), the smallest possible peak of {name}; name more memory, or make the "
            "workload smaller elsewhere",
            smallest_budget_bytes=peak_bytes,
        )

    def notes(self, found: Found) -> list[str]:
        name, lines = self.family.parameter, []
        if found.misfits:
            misfits = ", ".join(map(str, found.misfits))
            lines.append(f"{name} is not monotonic: {misfits} do not fit, and {found.value} does")
        if found.following is None and found.value is not None:
            refused = {value: error for value, error in self.quick.refusals.items() if value > found.value}
            if refused:
                first = min(refused)
                lines.append(f"the workload takes no {name} of {first}: {named_line(refused[first])}")
            elif self.is_open:
                lines.append(f"every {name} up to {found.value} fits; larger ones were not asked for")
            else:
                lines.append(f"the range ends at {self.high}: larger ones were not tried, and may fit too")
        return lines


def _machine(
    device_memory: str | int | None,
    margin: str | int,
    roofline: str | None,
    link: str | float | None,
    compute_scale: float | None,
    spill_dir: str | None,
) -> tuple[Machine, int, int]:
    """The machine, and bytes of its memory and of the margin; raises ``UsageError``."""
    known_bytes = 0 if roofline is None else parse_roofline(roofline).memory_bytes
    if device_memory is None and not known_bytes:
        raise UsageError("device memory: expected a size such as 16GiB, found none; name it")
    memory_bytes = known_bytes if device_memory is None else parse_bytes(device_memory, "device memory")
    margin_bytes = parse_bytes(margin, "margin", least=0)
    if margin_bytes >= memory_bytes:
        raise UsageError(
            f"device memory: expected more than the margin of {format_bytes(margin_bytes)}, found "
            f"{format_bytes(memory_bytes)}; name more memory, or a smaller margin"
        )
    return Machine(memory_bytes - margin_bytes, roofline, link, compute_scale, spill_dir), memory_bytes, margin_bytes

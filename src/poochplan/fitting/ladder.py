"""Values between the largest in-core one and the largest there is, and what each takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from poochplan.formats.plan import Plan

from .family import Family
from .probes import Probes, Sight

MOST_RUNGS = 8
"""Powers of two of a ladder; of more, as many are taken evenly."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One value: its memory, and the figures of its plan within the memory."""

    value: int
    in_core_peak_bytes: int
    smallest_peak_bytes: int
    """No plan has a smaller peak."""
    fits: bool
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


def ladder_values(in_core: int | None, largest: int, smallest: int, most: int = MOST_RUNGS) -> tuple[int, ...]:
    """The largest in-core value, powers of two above it, and the largest; from the smallest where none is in-core."""
    first = smallest if in_core is None else in_core
    powers = [1 << exponent for exponent in range(largest.bit_length()) if first < 1 << exponent < largest]
    if len(powers) > most:
        powers = [powers[index * (len(powers) - 1) // (most - 1)] for index in range(most)]
    return tuple(sorted({first, *powers, largest}))


def rung_at(family: Family, value: int, probes: Probes, *, is_measured: bool) -> Rung:
    """The value's rung; raises what profiling it raises."""
    sight = probes.sight(value)
    if not probes.has_plan(value):
        return bytes_of(value, sight, is_measured=is_measured)
    made = probes.plan(value)
    prediction = made.prediction
    return Rung(
        value=value,
        in_core_peak_bytes=sight.in_core_peak_bytes,
        smallest_peak_bytes=sight.smallest_peak_bytes,
        fits=bool(probes.fits(value)),
        in_core_step_s=prediction.in_core_step_s,
        step_s=prediction.step_s,
        overhead=prediction.overhead,
        bound_overhead=_bound_of(made),
        items_per_s=family.items(value) / prediction.step_s if prediction.step_s > 0 else None,
        is_measured=is_measured,
    )


def bytes_of(value: int, sight: Sight, *, is_measured: bool) -> Rung:
    """A rung without a plan: what the value would take."""
    return Rung(
        value=value,
        in_core_peak_bytes=sight.in_core_peak_bytes,
        smallest_peak_bytes=sight.smallest_peak_bytes,
        fits=False,
        is_measured=is_measured,
    )


def ladder(family: Family, values: tuple[int, ...], probes: Probes, *, is_measured: bool) -> tuple[Rung, ...]:
    """The rungs of those values that the workload takes."""
    taken = [value for value in values if probes.has_plan(value) is not None]
    return tuple(rung_at(family, value, probes, is_measured=is_measured) for value in taken)


def _bound_of(made: Plan) -> float | None:
    if made.solve.bound_s is None or made.prediction.in_core_step_s <= 0:
        return 0.0 if made.prediction.overhead <= 0 else None
    return made.solve.bound_s / made.prediction.in_core_step_s - 1

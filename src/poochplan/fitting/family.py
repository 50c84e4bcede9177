"""A workload as a function of one of its whole-number parameters, and steps of one of its values under a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from poochplan import verify
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.profiler.fake.fake import building
from poochplan.profiler.request import ProgressCallback, checked_device
from poochplan.workload import Workload, load_workload, parameter_values, parse_override

Target = str | Callable[..., Workload]
"""The argument of :func:`poochplan.workload.load_workload`: a name, a TOML file, a function's name, or the function
itself."""


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


def tried(
    family: Family, value: int, made: Plan, steps: int, in_core: bool, spill_dir: str | None, say: ProgressCallback
) -> Trial:
    """Runs steps under the plan and, with ``in_core``, the same ones without it; raises what ``apply`` raises."""
    say(f"{family.parameter} {value}, {steps} steps under its plan")
    build = partial(family.workload, value)
    how: dict[str, Any] = {"steps": steps, "timed_steps": 0, "seed": family.seed, "spill_dir": spill_dir}
    compared = verify.check(build, made, **how) if in_core else None
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

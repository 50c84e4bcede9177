"""A workload as a function of one of its whole-number parameters: what is varied, and what a step then works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from poochplan.errors import UsageError
from poochplan.verify import seed_everything
from poochplan.workload import Workload, load_workload, parameter_values, parse_override

Target = str | Callable[..., Workload]
"""What :func:`poochplan.workload.load_workload` takes: a name, a TOML, a function's name, or the function itself."""


@dataclass(frozen=True)
class Family:
    """Workloads that differ in one whole-number parameter."""

    target: Target
    name: str
    """The workload's short name."""
    parameter: str
    own: int | None
    """The value that the workload has unless another is given; None where it has none."""
    settings: Mapping[str, Any]
    """Of other parameters, as ``--set`` gives them."""
    assumed: Mapping[str, int]
    """Whole-number parameters that are not varied: sizes of images, sequences and layers."""
    batch: int
    """Samples of a step, where another parameter says so; else 1."""
    seed: int = 0

    def workload(self, value: int) -> Workload:
        """The seeded workload with that value; raises what ``load_workload`` raises."""
        seed_everything(self.seed)
        return load_workload(self.target, {**self.settings, self.parameter: value}).workload

    def items(self, value: int) -> int:
        """What a step works on, in units of :attr:`unit`."""
        return value * self.batch if self.is_comparable else self.batch

    @property
    def unit(self) -> str:
        """What throughput counts: samples, positions of sequences, or steps where nothing says how many samples."""
        if _is_length(self.parameter):
            return "positions"
        return "samples" if self.batch > 1 or _is_batch(self.parameter) else "steps"

    @property
    def is_comparable(self) -> bool:
        """Whether items per second of two values say which is better: the items are alike, and more is more work."""
        return _is_batch(self.parameter) or _is_length(self.parameter)


def family_of(target: Target, parameter: str, settings: Mapping[str, Any] | None = None, seed: int = 0) -> Family:
    """The workloads of ``target`` that differ in ``parameter``; builds none of them.

    An unknown parameter is left to ``load_workload``, which names the known ones.

    Raises
    ------
    UsageError
        The parameter is set as well, or what it has is no whole number; or the workload is not found.
    """
    given = {
        name: parse_override(value) if isinstance(value, str) else value for name, value in (settings or {}).items()
    }
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
    batch = next((value for key, value in assumed.items() if _is_batch(key)), 1)
    return Family(target, name, parameter, own.get(parameter), settings or {}, assumed, batch, seed)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_batch(parameter: str) -> bool:
    return "batch" in parameter


def _is_length(parameter: str) -> bool:
    return "length" in parameter

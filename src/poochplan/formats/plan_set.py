"""PlanSet: several plans for one model, each for inputs of another shape. Pure; no torch."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from poochplan.errors import ModelMismatchError, UsageError

from .plan import Plan

Signature = tuple[str, ...]
"""A step's inputs, one ``path dtype[shape]`` a tensor; as ``tensors.signatures.input_signature`` gives them."""

_ENTRY = re.compile(r"(?P<path>.*) (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]", re.DOTALL)


class InputShape(NamedTuple):
    """One entry of a signature."""

    path: str
    dtype: str
    shape: tuple[int, ...]

    def holds(self, other: InputShape) -> bool:
        """Whether ``other`` is the same input at the same size or smaller in some dimensions."""
        same = (self.path, self.dtype, len(self.shape)) == (other.path, other.dtype, len(other.shape))
        return same and all(mine >= theirs for mine, theirs in zip(self.shape, other.shape, strict=True))


class PlanSet:
    """Plans for one model on one device; :meth:`choose` gives the plan that a step with given inputs follows.

    Raises
    ------
    UsageError
        There is no plan, a plan has no inputs, two plans are for the same inputs, or they differ in device or in the
        throttle.
    ModelMismatchError
        Two plans are for different models.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        _check(self.plans)
        self._inputs = [_parse(plan.inputs) for plan in self.plans]
        self._elements = [sum(math.prod(entry.shape) for entry in inputs) for inputs in self._inputs]

    @classmethod
    def load(cls, *paths: str | Path) -> PlanSet:
        """Reads each file as a plan; raises the errors of ``Plan.load`` and the constructor."""
        return cls([Plan.load(path) for path in paths])

    def choose(self, signature: Signature) -> Plan | None:
        """The plan for exactly these inputs, otherwise the nearest larger one; None if there is none.

        Larger means: the same inputs by path, dtype and number of dimensions, and no dimension smaller. The nearest
        is the one with the fewest elements in all, the first of those.
        """
        asked = _parse(signature)
        larger = [index for index, inputs in enumerate(self._inputs) if _hold(inputs, asked)]
        return self.plans[min(larger, key=self._elements.__getitem__)] if larger else None

    @property
    def largest(self) -> Plan:
        """The plan whose inputs have the most elements, the first of those."""
        return self.plans[self._elements.index(max(self._elements))]


def plans_of(given: Plan | PlanSet) -> tuple[Plan, ...]:
    """The plans of a set, or the one plan."""
    return given.plans if isinstance(given, PlanSet) else (given,)


def is_larger(one: Signature, other: Signature) -> bool:
    """Whether a plan for the first serves the second: the same inputs, and none of the second's dimensions larger.

    False if one of them has no inputs, or is not a valid signature.
    """
    try:
        return bool(one) and _hold(_parse(one), _parse(other))
    except UsageError:
        return False


def _hold(inputs: list[InputShape], others: list[InputShape]) -> bool:
    return len(inputs) == len(others) and all(mine.holds(theirs) for mine, theirs in zip(inputs, others, strict=True))


def describe(signature: Signature) -> str:
    """The signature as it stands in messages."""
    return ", ".join(signature) or "nothing"


def _check(plans: tuple[Plan, ...]) -> None:
    if not plans:
        raise UsageError("PlanSet: expected at least one plan, found none; pass the plans as a list")
    first, numbers = plans[0], dict[Signature, int]()
    for number, plan in enumerate(plans, 1):
        if not plan.inputs:
            raise UsageError(
                f"PlanSet: expected plans that say what inputs they are for, found none in plan {number} "
                f"({plan.workload}); make a new profile whose step calls the model, and plan from it"
            )
        same = numbers.setdefault(tuple(sorted(plan.inputs)), number)
        if same != number:
            raise UsageError(
                f"PlanSet: expected plans for different inputs, found plans {same} and {number} both for "
                f"{describe(plan.inputs)}; drop one"
            )
        if plan.model.fingerprint != first.model.fingerprint:
            raise ModelMismatchError(
                f"PlanSet: expected plans for one model, found plan 1 for {first.workload} and plan {number} for "
                f"{plan.workload}, whose parameters or buffers differ; make a set for each model"
            )
    check_alike("PlanSet", {f"plan {number}": plan for number, plan in enumerate(plans, 1)})


def check_alike(what: str, plans: Mapping[str, Plan]) -> None:
    """Raises ``UsageError`` if the plans differ in a setting of which a session has only one; they are called by their
    keys, and all of them ``what``.
    """
    (first_name, first), *others = plans.items()
    for name, plan in others:
        for setting, expected, found in (
            ("device", first.device, plan.device),
            ("throttle", first.link.throttle_bytes_per_s, plan.link.throttle_bytes_per_s),
        ):
            if found != expected:
                raise UsageError(
                    f"{what}: expected plans for one {setting}, found {expected} in {first_name} and {found} in "
                    f"{name}; profile all of them with the same settings"
                )


@functools.lru_cache(maxsize=256)
def _parse(signature: Signature) -> list[InputShape]:
    """The entries by path, since keyword arguments may come in any order. Raises ``UsageError`` for any other text."""
    entries = []
    for text in signature:
        entry = entry_of(text)
        if entry is None:
            raise UsageError(f"inputs: expected entries such as '0 float32[8, 3]', found {text!r}; make a new plan")
        entries.append(entry)
    return sorted(entries)


def entry_of(text: str) -> InputShape | None:
    """The entry of a signature that the text is; None for any other text."""
    match = _ENTRY.fullmatch(text)
    if match is None:
        return None
    shape = tuple(int(size) for size in match["shape"].split(",") if size.strip())
    return InputShape(match["path"], match["dtype"], shape)

"""Which random program notices a runtime that is broken in one place."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from poochplan.runtime.replays import compiled_tape
from tests.runtime.mutants import Mutant, rewritten
from tests.runtime.test_mutants import MUTANTS
from tests.runtime.test_rules import RULES

from .drawing import Program
from .training import Snapshot
from .trial import FAILING, Tried, prepared, under


class Ready(NamedTuple):
    """A program with its plans and what its steps give in-core, made while the runtime was whole."""

    program: Program
    plans: list[Tried]
    reference: list[Snapshot]


def ready(program: Program) -> Ready:
    return Ready(program, *prepared(program))


def all_mutants() -> dict[str, dict[str, Mutant]]:
    """By group and name: the waits and releases of the runtime, and the lines that keep its rules."""
    return {
        "waits and releases": {mutant.label: mutant for mutant in MUTANTS},
        "rules": {name: rewritten(*where) for name, (where, _) in RULES.items()},
    }


def caught_by(mutant: Mutant, programs: list[Ready]) -> tuple[int | None, str]:
    """The seed of the first program that notices, and what it says; ``(None, "")`` where none does."""
    with mutant.in_place(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_tape, "IS_WANTED", False)  # Python has the lines that are changed
        for one in programs:
            if problem := _first_problem(one):
                return one.program.seed, problem
    return None, ""


def _first_problem(one: Ready) -> str:
    for device in ("adversarial", FAILING, "cpu"):
        for tried in one.plans[:1] if device == FAILING else one.plans:
            problems = under(one.program, tried, one.reference, device).problems
            if problems:
                return problems[0]
    return ""

"""A share of each judge that nobody here wrote, another one each week: ``benchmarks/judges`` runs them whole."""

from __future__ import annotations

import datetime
import random
import warnings
from collections.abc import Iterator

import pytest

from benchmarks.judges import architectures, databases
from benchmarks.judges.others_bugs import BUGS, judged
from tests.depth import tries
from tests.runtime.served import needs_compiler

WEEK = datetime.date.today().isocalendar().week
RIGHT = ("equal", "unsteady", "not tried", "not buildable", "fails plain")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without what others' networks warn of, and steps that leave their plans."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@needs_compiler
def test_samples_of_torchs_databases_train_under_plans_as_without() -> None:
    found = databases.nothing_yet()
    wrong = databases.run_share(databases.entries(), tries(16, 200), WEEK, found)
    assert wrong == [], found["named"]
    assert found["served"] > 0


@needs_compiler
def test_architectures_of_transformers_train_under_plans_as_without() -> None:
    names = random.Random(WEEK).sample(architectures.names(), tries(4, 30))
    found = {name: architectures.tried(name) for name in ["bert", *names]}
    assert {name: one for name, one in found.items() if one["status"] not in RIGHT} == {}
    assert found["bert"]["status"] == "equal"


@needs_compiler
@pytest.mark.parametrize("name", BUGS)
def test_what_others_have_reported_does_not_happen_under_a_plan(name: str) -> None:
    row = judged(BUGS[name])
    assert row["right"], row["poochplan"]

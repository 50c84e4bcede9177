"""A share of each judge that nobody here wrote, another one each week: ``benchmarks/judges`` runs them whole."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from benchmarks.judges import architectures
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


def share_of_databases(count: int, seed: int) -> tuple[list[Any], dict[str, Any]]:
    """To be run in a process of its own: torch's test modules forbid to set switches of its backends by name."""
    from benchmarks.judges import databases

    warnings.simplefilter("ignore")
    gc.freeze()  # a session looks at all that the collector knows, and these modules hold some 400,000 objects
    found = databases.nothing_yet()
    return databases.run_share(databases.entries(), count, seed, found), found


@needs_compiler
def test_samples_of_torchs_databases_train_under_plans_as_without() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        wrong, found = process.submit(share_of_databases, tries(16, 200), WEEK).result()
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

"""What ``auto`` says is on one page of the docs, in words that are explained there and nowhere else needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from poochplan.online import auto_messages, studied_plans
from poochplan.online.before_plan import Unplanned
from poochplan.runtime import session

PAGE = (Path(__file__).parents[2] / "docs" / "messages.md").read_text()
LINES = [
    *(value for name, value in vars(auto_messages).items() if name.isupper() and isinstance(value, str)),
    auto_messages.profiled(11, 1),
    auto_messages.profiled(11, 2),
    *(f"{one} from now on" for one in (session.FROM_SMALLER, session.FROM_TORCH)),
    auto_messages.without_plan("a later part of the loop uses the saved tensors", Unplanned.IN_CORE),
    session.HOST_IS_FULL.format("1.50 GiB", "No space left on device"),
    f"{session.FROM_TORCH}, and not from one arena",
    auto_messages.not_planned("no room"),
    auto_messages.lacks_arena(1_268_455),
    auto_messages.dearer(0.0721, 0.0489, "", is_planned_again=False).split(":")[0],
    *(why for name, why in vars(studied_plans).items() if name in ("COPIES", "NO_ARENA", "BUSY", "SLOWER")),
]
DIALECT = re.compile(r"\b(kind|kinds|segment|segments|served|beside the step)\b")


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_on_the_page(line: str) -> None:
    head = re.split(r" \(|: expected|: no room", line)[0]
    assert head in PAGE


def test_no_line_has_words_of_the_code() -> None:
    assert [line for line in LINES if DIALECT.search(line)] == []

"""Which plans of earlier runs a loop finds again."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from poochplan.online.plan_cache import code_digest

MODEL = """
from torch import nn

class Model(nn.Linear):
    def forward(self, batch):
        return super().forward(batch).{}()
"""


def test_a_model_whose_code_has_changed_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan's replays were tried with the code of then."""
    file = tmp_path / "code_that_changes.py"
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text(MODEL.format("relu"))
    model = importlib.import_module("code_that_changes").Model(2, 2)
    before = code_digest(model)
    assert code_digest(model) == before
    file.write_text(MODEL.format("tanh"))
    assert code_digest(model) != before

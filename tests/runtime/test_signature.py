"""The inputs of a step, as text: the same from a profile, a profile without memory, and a running session."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

import poochplan
from poochplan.tensors.signatures import input_signature
from tests.runtime.nets import CASES, taken

pytestmark = pytest.mark.cpu_device
Pair = namedtuple("Pair", "left right")


def test_every_tensor_is_named_by_its_path() -> None:
    one, two = torch.zeros(2, 3), torch.zeros(4, dtype=torch.bool)
    assert input_signature((one, [two, {"mask": two}], 7, None), {"ids": one.long(), "flag": True}) == (
        "0 float32[2, 3]",
        "1.0 bool[4]",
        "1.1.mask bool[4]",
        "ids int64[2, 3]",
    )
    assert input_signature((Pair(one, two),), {}) == ("0.left float32[2, 3]", "0.right bool[4]")
    assert input_signature((), {"batch": BatchEncoding({"ids": one})}) == ("batch.ids float32[2, 3]",)
    assert input_signature((), {}) == ()


@pytest.mark.parametrize("options", [{}, {"mode": "fake", "roofline": "v100"}], ids=["run", "fake"])
def test_the_profile_and_the_plan_say_what_the_model_is_called_with(options: dict[str, str]) -> None:
    profile = CASES["attention"].profile(**options)
    assert profile.inputs == ("0 int64[3, 24]",)
    assert poochplan.plan(profile, "100%").inputs == profile.inputs


def test_of_several_calls_the_first_counts_and_keywords_go_by_name() -> None:
    class Scaled(nn.Linear):
        def forward(self, batch: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(batch) * scale

    model, scale = Scaled(8, 8), torch.ones(())
    profile = taken(lambda: (model(torch.ones(4, 8), scale=scale) + model(torch.ones(1, 8), scale=scale)).sum(), model)
    assert profile.inputs == ("0 float32[4, 8]", "scale float32[]")


def test_a_model_that_is_never_called_has_no_inputs() -> None:
    model = nn.Linear(8, 8)
    profile = taken(lambda: model.forward(torch.ones(4, 8)).sum(), model)
    assert profile.inputs == ()

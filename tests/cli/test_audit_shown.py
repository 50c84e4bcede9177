"""``--on-audit`` on the command line: what a late write past the dispatcher ends a run with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import poochplan
from poochplan.formats.plan import Decision
from tests.cli.conftest import Pooch
from tests.runtime.random_plans import decided

LATE = '''
"""A network that begins to write what it has saved, by NumPy, in its 31st step."""

import torch

import poochplan


class Late(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(32, 32), 0

    def forward(self, images):
        hidden = self.layer(images)
        found = hidden.sin()
        self.calls += 1
        if self.calls > 30:
            hidden.detach().numpy()[:] += 0.5
        return found


def late() -> poochplan.Workload:
    model, images = Late(), torch.randn(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return poochplan.Workload(model, lambda: model(images).square().mean(), optimizer)
'''
RUN = "run late.py:late --plan late.plan.json --steps 34 --timed 1 --arena off --check"


@pytest.fixture
def late(pooch: Pooch) -> Pooch:
    """In its folder are a workload that writes late, and a plan that recomputes the one value that is written."""
    Path("late.py").write_text(LATE)
    pooch.ok("profile late.py:late --iterations 1 --warmup 1 -o late.profile.json")
    profile = poochplan.Profile.load("late.profile.json")
    plan = decided(profile, [Decision.KEEP, Decision.RECOMPUTE, Decision.KEEP])
    assert [value.name for value in plan.values if value.decision is not Decision.KEEP] == ["layer/addmm"]
    plan.save("late.plan.json")
    return pooch


def test_by_default_a_late_write_is_told_in_one_line_and_the_run_goes_on_bitwise(late: Pooch) -> None:
    result = late.ok(RUN)
    (told,) = [line for line in result.err.splitlines() if "the audit" in line]
    assert "found other bytes than forward left in layer/addmm (recomputed, layer layer)" in told
    assert "backward has used the right ones" in told
    assert re.search(r"gradients bitwise equal +yes", result.out)


def test_as_an_error_it_ends_the_run_with_exit_code_1_and_that_line_alone(late: Pooch) -> None:
    assert late.refused(RUN, "--on-audit error", code=1).startswith("the audit found other bytes than forward left in")


def test_without_the_audit_the_comparison_alone_finds_other_bits(late: Pooch) -> None:
    error = late.refused(RUN, "--on-audit off", code=1)
    assert "not bitwise equal to in-core: step 30: gradient layer.weight differs" in error
    assert "the audit" not in error


def test_another_word_is_refused_with_those_that_are_known(late: Pooch) -> None:
    result = late(RUN, "--on-audit maybe")
    assert result.code == 2
    assert "invalid choice: 'maybe' (choose from" in result.err

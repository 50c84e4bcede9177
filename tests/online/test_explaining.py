"""A session of auto says where its step takes most, before there is a plan and under it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import poochplan
from poochplan.formats.profile import preset_link
from poochplan.units import format_bytes


def test_a_session_explains_the_in_core_peak_and_then_the_planned_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = []
    options = {"cache": tmp_path, "link": preset_link("pcie3"), "time_limit_s": 0.5, "quiet": True}
    with poochplan.auto(model, optimizer, budget="60%", **options) as session:
        assert session.explain_peak() == ""
        for _ in range(30):
            model(torch.randn(512, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.profile is not None:
                texts.append(session.explain_peak())
                session.wait_until_planned()
    assert session.profile is not None
    assert session.plan is not None
    assert texts[0].startswith(f"predicted peak {format_bytes(session.profile.in_core_peak_bytes)} in-core: in ")
    budget = format_bytes(session.plan.budget_bytes)
    first = texts[-1].splitlines()[0]
    assert f" of a budget of {budget}, measured " in first
    assert session.total.peak_bytes is not None
    assert f"measured {format_bytes(session.total.peak_bytes)}: in " in first
    assert texts[-1] == session.explain_peak()

"""The pages of loops: their code trains, and what they import is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from tests.docs.test_docs import blocks
from tests.online.caches import costs_are_known, empty_cache
from tests.processes import ROOT

STACKS = sorted((ROOT / "docs" / "stacks").glob("*.md"))
EXAMPLES = {
    "hf-trainer": "hf_trainer",
    "accelerate": "accelerate_loop",
    "lightning": "lightning_module",
    "ddp": "ddp_torchrun",
    "fsdp": "fsdp_torchrun",
}
"""Pages whose code is run by the tests of an example, which has the names that the page takes for given."""
Names = dict[str, Any]


@pytest.fixture(autouse=True)
def _a_cache_of_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with empty_cache(tmp_path_factory.mktemp("cache")):
        costs_are_known()
        yield


def network(steps: int = 3) -> Names:
    """What the pages take for given: a model, its optimizer, batches, and a loop."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(512, 64)] * steps

    def train() -> None:
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    given = {"model": model, "optimizer": optimizer, "batches": batches, "train": train, "poochplan": poochplan}
    return given | {"loss_of": lambda output: output.square().mean()}


def adversaries() -> Names:
    given = network()
    for name in ("generator", "critic"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        given |= {name: model, f"{name}_optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return given


class Recurrent(nn.Module):
    """Reads vectors one after the other; its state is that of its only recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def begin(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, count, 8), torch.zeros(1, count, 8)

    def forward(self, chunk: torch.Tensor, state: Any) -> Any:
        hidden, after = self.cell(chunk, state)
        return self.head(hidden), after


def recurrent() -> Names:
    model = Recurrent()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return network() | given | {"texts": [torch.randn(4, 64, 8) for _ in range(3)]}


def trained(page: str, names: Names, language_block: int = 0) -> Names:
    exec(blocks(ROOT / page, "python")[language_block], names)
    return names


@pytest.mark.parametrize(
    ("page", "given"),
    [
        ("README.md", network),
        ("docs/online.md", network),
        ("docs/stacks/plain-loop.md", network),
        ("docs/stacks/accumulate.md", lambda: network(4)),
        ("docs/stacks/truncated.md", recurrent),
        ("docs/stacks/several-models.md", adversaries),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_loop_of_a_page_trains(page: str, given: Callable[[], Names]) -> None:
    names = given()
    models = [names[name] for name in ("generator", "critic") if name in names] or [names["model"]]
    weights = [next(model.parameters()) for model in models]
    before = [weight.detach().clone() for weight in weights]
    trained(page, names)
    assert not any(torch.equal(old, new) for old, new in zip(before, weights, strict=True))


def test_the_cell_of_the_page_on_notebooks_ends_with_a_plan_that_is_followed_and_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = trained("docs/stacks/notebooks.md", network(12))
    assert names["session"].plan is not None
    said = capsys.readouterr().out
    assert said.startswith("predicted peak ")
    assert ", measured " in said.splitlines()[0]
    trained("docs/online.md", names, 1)
    assert poochplan.Plan.load("plan.json").budget_bytes == names["session"].plan.budget_bytes


@pytest.mark.parametrize("page", STACKS, ids=lambda page: page.stem)
def test_what_a_page_imports_is_there(page: Path) -> None:
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("page", EXAMPLES)
def test_a_page_of_a_framework_says_what_its_example_does(page: str) -> None:
    (code,) = blocks(ROOT / "docs" / "stacks" / f"{page}.md", "python")
    example = (ROOT / "examples" / f"{EXAMPLES[page]}.py").read_text(encoding="utf-8")
    known = "PlanCallback(", "poochplan.auto(", ".prepare(", "accelerator.accumulate("
    calls = [call for call in known if call in code]
    assert calls
    assert [call for call in calls if call not in example] == []
    assert f"{EXAMPLES[page]}.py" in (ROOT / "docs" / "stacks" / f"{page}.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_site_and_in_the_list() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = (ROOT / "docs" / "stacks" / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in STACKS if f"stacks/{page.name}" not in site] == []
    assert [page.name for page in STACKS if page.stem != "index" and f"({page.name})" not in listed] == []

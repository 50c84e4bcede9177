"""The notebooks are stored as they ran: with outputs, small, and with no folder of the machine in them."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LARGEST_PICTURE_BYTES, LARGEST_NOTEBOOK_BYTES = 250_000, 1_000_000
FOLDER = re.compile(r"/(home|root|work|tmp|Users|opt|mnt)/")
ON_A_GPU = Path(__file__).parents[2] / "notebooks" / "gpu_first_report.ipynb"
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", ())]


def is_there(module: str, name: str) -> bool:
    there = importlib.import_module(module)
    return hasattr(there, name) or (hasattr(there, "__path__") and find_spec(f"{module}.{name}") is not None)


def test_there_are_four_and_one_for_a_gpu() -> None:
    assert len(NOTEBOOKS) == 5
    assert ON_A_GPU in NOTEBOOKS


def test_without_a_gpu_the_one_for_it_says_so_and_ends() -> None:
    text = "".join("".join(output.get("text", "")) for output in outputs(ON_A_GPU))
    assert text.startswith("There is no GPU that torch can use here, so this notebook ends")
    assert text.endswith("there is nothing to report yet.\n")


@notebooks
def test_what_it_imports_of_ours_is_there(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
    source = "\n".join(line for line in lines if not line.startswith("%"))
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").split(".")[0] in ("poochplan", "benchmarks")]
    names = [(str(node.module), alias.name) for node in ours for alias in node.names]
    assert [name for name in names if not is_there(*name)] == []


@notebooks
def test_every_cell_was_run_in_its_order_and_none_failed(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert {output["output_type"] for output in outputs(path)} <= {"stream", "display_data", "execute_result"}


@pytest.mark.parametrize("path", [one for one in NOTEBOOKS if one != ON_A_GPU], ids=lambda path: path.stem)
def test_it_shows_pictures_and_they_are_small(path: Path) -> None:
    shown = [output["data"]["image/png"] for output in outputs(path) if "image/png" in output.get("data", {})]
    pictures = [base64.b64decode(picture) for picture in shown]
    assert len(pictures) >= 2
    assert max(map(len, pictures)) <= LARGEST_PICTURE_BYTES
    assert path.stat().st_size <= LARGEST_NOTEBOOK_BYTES


@notebooks
def test_its_outputs_name_no_folder_of_a_machine(path: Path) -> None:
    texts = [
        json.dumps({kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"})
        + "".join(output.get("text", ""))
        for output in outputs(path)
    ]
    assert [text for text in texts if FOLDER.search(text)] == []

"""Private names of torch are in one folder; elsewhere the package takes what its files give."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("planner", "profiler", "runtime", "src/poochplan")
HOME = Path("src/poochplan/torch_private")
ON_OBJECTS = {
    "_version",
    "_cdata",
    "_schema",
    "_overloadpacket",
    "_sequence_nr",
    "_buffers",
    "_parameters",
    "_modules",
    "_non_persistent_buffers_set",
    "_orig_mod",
    "_compiled_call_impl",
    "_indices",
    "_values",
}
"""Names of torch that are private on its tensors, storages, ops, nodes and modules."""


def private_names(source: str) -> list[str]:
    """What a module takes of torch that begins with an underscore, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute) and not _is_own(node):
            text = ast.unparse(node)
            names = [text] if text.startswith("torch.") or node.attr in ON_OBJECTS else []
        elif isinstance(node, ast.Constant) and node.value in ON_OBJECTS:
            names = [node.value]
        found += [f"{node.lineno}: {name}" for name in names if _is_private(name)]
    return found


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize(
    "source",
    [
        "from torch._guards import TracingContext",
        "from torch.utils import _pytree",
        "torch._C._current_graph_task_id()",
        "tensor._version",
        "getattr(module, '_orig_mod', None)",
    ],
)
def test_a_private_name_is_seen(source: str) -> None:
    assert private_names(source)


def test_private_names_of_torch_are_in_one_folder() -> None:
    files = {path.resolve().relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    at_home = {file for file in files if file.parent == HOME}
    assert len(at_home) == 9
    used = {str(file): names for file in files - at_home if (names := private_names((ROOT / file).read_text()))}
    assert not used, f"take them from {HOME}: {used}"

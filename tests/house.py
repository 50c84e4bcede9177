"""The house as its imports draw it: modules, who imports whom, circles, and how full the folders are.

Also imports under ``TYPE_CHECKING`` and inside functions count: a circle is one wherever it is hidden.

    python tests/house.py [ROOT]    prints the figures of a checkout
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("planner", "profiler", "runtime")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is the name of its folder."""
    inside = root / "src" / "poochplan"
    files = [path for room in ROOMS for path in (root / room).rglob("*.py")]
    found = {_dotted(path.relative_to(root)): path for path in files}
    own = (path for path in inside.rglob("*.py") if path.relative_to(inside).parts[0] not in ROOMS)
    return found | {_dotted(path.relative_to(inside)): path for path in own}


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("poochplan", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """What ``name`` imports anywhere in its file: modules of the package, and the first names of all others."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(name, path, node)
            found.update(full if (full := f"{base}.{alias.name}") in known else base for alias in node.names)
    return {target if target in known else target.split(".")[0] for target in found} - {name}


def _base(name: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    own = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*own[: len(own) - node.level + 1], *([node.module] if node.module else [])])


@functools.cache
def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Module -> what it imports. What a package's ``__init__`` hands on is not followed."""
    known = modules(root)
    return {name: imports(name, path, known) for name, path in known.items()}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the one before, and the last is the first again; empty if there are none."""
    try:
        TopologicalSorter({name: targets & edges.keys() for name, targets in edges.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def room_of(name: str) -> str:
    """The room that a module of ``poochplan`` is in, or its own name where it stands beside the rooms."""
    return name.split(".")[1] if name.startswith("poochplan.") else ""


def files_per_folder(root: Path = ROOT) -> Counter[str]:
    """Modules in each folder, without ``__init__``."""
    found = modules(root)
    return Counter(str(path.parent.relative_to(root)) for path in found.values() if path.name != "__init__.py")


def twice(root: Path = ROOT) -> list[str]:
    """Base names that more than one module has; folders and the command line's verbs do not count."""
    names = Counter(path.stem for name, path in modules(root).items() if room_of(name) != "cli")
    return sorted(name for name, count in names.items() if count > 1 and name != "__init__")


def code_lines(path: Path) -> int:
    """Lines of a module that are no blank, comment, docstring or import."""
    source, others = path.read_text(encoding="utf-8"), set[int]()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            others.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in others for number, line in lines)


def figures(root: Path) -> Iterator[str]:
    """What ``benchmarks/pages/house.md`` says of the house, a line each."""
    edges = graph(root)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules(root).values())
    yield f"modules {len(edges)}, lines {lines}, of code {sum(map(code_lines, modules(root).values()))}"
    for folder, count in sorted(files_per_folder(root).items()):
        yield f"  {folder}: {count}"
    yield f"circle: {', '.join(circle(edges)) or 'none'}"
    yield f"base names that exist twice: {', '.join(twice(root)) or 'none'}"


if __name__ == "__main__":
    print("\n".join(figures(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))

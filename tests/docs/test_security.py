"""What SECURITY.md says of the package's own code: no pickles, no evaluated text, no network."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.docs.prose import ROOT

FORBIDDEN_MODULES = {
    *("pickle", "dill", "shelve", "marshal", "joblib"),  # files that run code
    *("socket", "http", "urllib", "requests", "ftplib", "smtplib", "ssl"),  # network
    *("subprocess", "pty"),
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "os.system",
    "np.load",
    "pd.read_pickle",
}
ALLOWED = {"src/poochplan/online/background.py": {"subprocess"}, "src/poochplan/native.py": {"subprocess"}}
"""The process that plans beside a loop, and the compiler, as SECURITY.md says."""
SOURCES = sorted(
    path for room in ("planner", "profiler", "runtime", "src/poochplan") for path in (ROOT / room).rglob("*.py")
)


def found_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
            found.add(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.add(ast.unparse(node.func))
    return found


def test_no_module_reads_pickles_evaluates_text_or_opens_a_connection() -> None:
    assert len(SOURCES) > 100
    assert {str(path.relative_to(ROOT)): found for path in SOURCES if (found := found_in(path))} == ALLOWED


@pytest.mark.parametrize(
    "code", ["import pickle", "from urllib.request import urlopen", "torch.load(path)", "eval(text)"]
)
def test_such_code_would_be_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    assert found_in(tmp_path / "module.py")

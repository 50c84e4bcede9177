"""What SECURITY.md says of the package's own code: no pickles, no evaluated text, no network."""

from __future__ import annotations

import ast

from tests.processes import ROOT

FORBIDDEN_MODULES = {
    *("pickle", "dill", "shelve", "marshal", "joblib"),  # files that run code
    *("socket", "http", "urllib", "requests", "ftplib", "smtplib", "ssl"),  # network
    *("subprocess", "pty"),
}
FORBIDDEN_CALLS = {
    *("eval", "exec", "os.system"),
    *("torch.load", "torch.save", "torch.hub.load", "np.load", "pd.read_pickle"),
}
ALLOWED = {"src/poochplan/online/background.py": {"subprocess"}, "src/poochplan/native.py": {"subprocess"}}
"""The process that plans beside a loop, and the compiler, as SECURITY.md says."""
ROOMS = "planner", "profiler", "runtime", "src/poochplan"
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def found_in(code: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
            found.add(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.add(ast.unparse(node.func))
    return found


def test_no_module_reads_pickles_evaluates_text_or_opens_a_connection() -> None:
    for code in ("import pickle", "from urllib.request import urlopen", "torch.load(path)", "eval(text)"):
        assert found_in(code)
    assert len(SOURCES) > 100
    every = {str(path.relative_to(ROOT)): found_in(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: found for path, found in every.items() if found} == ALLOWED

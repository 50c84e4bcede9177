"""Planning where nothing can be compiled."""

from __future__ import annotations

import tempfile
import textwrap

from tests.processes import python


def run_plain(code: str) -> str:
    """What the code prints where there is no compiler, and nothing that one has made."""
    says = "\nfrom poochplan.planner.simulator.evaluator import library\nassert library(None) is None\n"
    with tempfile.TemporaryDirectory() as folder:
        return python(textwrap.dedent(code) + says, is_fresh=True, XDG_CACHE_HOME=folder, CXX="no-such-compiler")

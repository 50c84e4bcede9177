"""The rows of a comparison in order, taken where the results file lacks them, and written as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.facts import write_results

from .asking import KEPT, OURS, base_of
from .methods import CHECKPOINT, COMPILED_CHECKPOINT, SAC, WITHOUT_A_BUDGET
from .rows import Effort, Found, Wanted, base, facts_of, row_of

MEMORY_BUDGETS = ("0.8", "0.5", "0.3", "0.1")
"""Of ``torch.compile``: shares of the saved bytes that its partitioner may keep."""
GRAPH_BUDGETS = ("0.8", "0.6")
"""Of ours: shares of the compiled step's in-core peak."""
MATCHED = (CHECKPOINT, SAC)
"""Methods at whose measured peak ours runs too."""


def wanted_rows(network: str, shares: list[str], policies: list[str], compiled: bool) -> Iterator[Wanted]:
    """Of one network. Rows at another method's peak come after that method's."""
    for method in (KEPT, *WITHOUT_A_BUDGET):
        yield Wanted(network, method)
    for share in shares:
        for method in (OURS, *policies):
            yield Wanted(network, method, share)
    for method in MATCHED:
        yield Wanted(network, OURS, method)
    for value in MEMORY_BUDGETS if compiled else ():
        yield Wanted(network, f"compile:{value}")
    for method in (COMPILED_CHECKPOINT, *(f"graph:{value}" for value in GRAPH_BUDGETS)) if compiled else ():
        yield Wanted(network, method)


class Campaign:
    """State: what the results file holds."""

    def __init__(self, effort: Effort, output: str | None, facts: dict[str, Any], note: str) -> None:
        self._effort, self._output, self._note = effort, output, note
        self.found: dict[str, Any] = {"networks": {}, "bases": {}, "rows": []}
        if output and Path(output).exists():
            self.found = _read(Path(output), self.found)
        self._facts = facts

    def take(self, wanted: Wanted, redo: bool = False) -> Found:
        known = self._row(wanted)
        if known is not None and not redo and self._serves(known):
            return known
        budget_bytes = self._budget_bytes(wanted) if wanted.is_planned else 0
        row = row_of(wanted, budget_bytes, self._base(wanted.network, base_of(wanted.method)), self._effort)
        row |= {"commit": self._facts.get("commit"), "note": self._note}
        if known is not None:
            self.found["rows"].remove(known)
        self.found["rows"].append(row)
        self.write()
        return row

    def write(self) -> None:
        write_results(self._output, self._facts | self.found | self._facts)

    def _serves(self, row: Found) -> bool:
        return bool(row["asked_pairs"] >= self._effort.pairs and row["threads"] == self._effort.threads)

    def _row(self, wanted: Wanted) -> Found | None:
        rows = self.found["rows"]
        return next((row for row in rows if (row["network"], row["method"], row["at"]) == wanted.key), None)

    def _base(self, network: str, method: str) -> Found:
        """The in-core step's peak and bits; as the file has them, if for as many threads."""
        known: Found = self.found["bases"].setdefault(network, {}).get(method, {})
        if known.get("threads") != self._effort.threads:
            known = base(network, method, self._effort) | {"threads": self._effort.threads}
            self.found["bases"][network][method] = known
        return known

    def _budget_bytes(self, wanted: Wanted) -> int:
        facts = self._network(wanted.network)
        if wanted.at in MATCHED:
            matched = self._row(Wanted(wanted.network, wanted.at)) or {}
            return int(matched["peak_bytes"] if "peak_bytes" in matched else facts["profile_peak_bytes"])
        return budget_bytes(facts, wanted.at or "100%")

    def _network(self, name: str) -> Found:
        """Peak and smallest budget; profiles the network where this run has not."""
        profile = Path(self._effort.folder) / f"{name}-profile.json"
        if not profile.exists():
            self.found["networks"][name] = facts_of(name, self._effort)
        found: Found = self.found["networks"][name]
        return found


def _read(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not new.keys() <= found.keys():
        raise SystemExit(f"{path}: expected a file of this comparison, with {', '.join(new)}; name another one with -o")
    return found


def budget_bytes(facts: Found, share: str) -> int:
    """A share of what decisions can move, on top of the smallest budget that has a plan."""
    smallest, most = facts["smallest_budget_bytes"], facts["profile_peak_bytes"]
    return int(smallest + float(share.rstrip("%")) / 100 * max(0, most - smallest))

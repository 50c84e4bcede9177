"""Fallbacks: where the plan was not followed, counted in the step's report and each kind warned of once."""

from __future__ import annotations

import warnings

from poochplan.runtime.run_report import FallbackKind, StepReport
from poochplan.runtime.watch.users_line import users_line


class Fallbacks:
    """State: the kinds that were warned of; and whether nothing is to be warned of for now (``silent``)."""

    def __init__(self) -> None:
        self.silent = False
        self._warned: set[FallbackKind] = set()

    def count(self, report: StepReport, kind: FallbackKind, reason: str) -> None:
        """One more of that kind, in the step of this report."""
        report.fallbacks += 1
        report.fallback_kinds[kind] = report.fallback_kinds.get(kind, 0) + 1
        if reason not in report.fallback_reasons:
            report.fallback_reasons.append(reason)
        if kind not in self._warned and not self.silent:
            self._warned.add(kind)
            warnings.warn(
                f"poochplan: {reason}",
                RuntimeWarning,
                stacklevel=users_line(),
            )

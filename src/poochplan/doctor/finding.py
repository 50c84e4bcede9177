"""Finding: one line of ``pooch doctor``."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Status(StrEnum):
    """How it stands."""

    OK = "ok"
    WARNING = "warning"
    """It works, slower or with less than it could."""
    MISSING = "missing"
    """Something cannot be done without it."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, what was found, and what to do about it."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """Empty where there is nothing to do."""


def judged(name: str, is_fine: bool, found: str, advice: str = "") -> Finding:
    """Fine, or a warning with its advice."""
    return Finding(
        name=name, status=Status.OK if is_fine else Status.WARNING, found=found, advice="" if is_fine else advice
    )

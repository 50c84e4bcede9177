"""Errors for users: one line that says what was expected, what was found and what to do.

Every error has the exit code of the command line, where only :func:`poochplan.cli.main` catches it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PoochError(Exception):
    """Base of all errors of this package; ``str(error)`` is one line."""

    exit_code = 1

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # names from files and messages of libraries may have several


class UsageError(PoochError):
    """The request is invalid: an unknown workload, an unreadable budget, a missing file."""

    exit_code = 2


class InputFileError(PoochError):
    """A profile or plan file is truncated, has another schema, or has other content than its name says."""


class OutputExistsError(PoochError):
    """An output file exists, and ``--force`` (``force=True``) was not given."""


class StepError(PoochError):
    """The user's step cannot be profiled or run: no scalar loss, no gradients, the wrong device."""


class ModelMismatchError(PoochError):
    """The plan or profile is for another model; the message names the first layer that differs."""


class DivergenceError(PoochError):
    """A step diverged from its plan; raised by ``pooch run`` and with ``on_divergence="error"``."""

    exit_code = 6


class AuditError(PoochError):
    """A value did not come back as it was when it was released; raised with ``on_audit="error"``."""


class BudgetExceededError(PoochError):
    """A step that followed its plan exceeded its budget; raised by ``pooch run`` and with ``on_over_budget="error"``.

    ``peak_bytes`` is the step's peak.
    """

    exit_code = 5

    def __init__(self, message: str, *, peak_bytes: int) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes


class SpillError(PoochError):
    """The spill directory cannot be used: it is missing, not writable or a tmpfs, or a read failed."""


class NativeError(PoochError):
    """A compiled part cannot be built or loaded; everything else works without it."""


class AllocatorError(NativeError):
    """The compiled allocator cannot be built, loaded or used."""


class SolverError(PoochError):
    """An ILP solver died; the message names the solver and the remedy."""


class InfeasibleError(PoochError):
    """No plan fits the budget.

    ``smallest_budget_bytes`` is the smallest budget for which a plan was found.
    """

    exit_code = 3

    def __init__(self, message: str, *, smallest_budget_bytes: int) -> None:
        super().__init__(message)
        self.smallest_budget_bytes = smallest_budget_bytes


class GapError(PoochError):
    """The plan's gap to the proven bound is larger than ``--max-gap``, or the search was interrupted. The plan is
    written.
    """

    exit_code = 4


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's and NumPy's ``MemoryError``, torch's on CUDA, and its plain
    ``RuntimeError`` of the CPU's allocator.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def check_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Raises ``UsageError`` if the value is none of the choices."""
    if value not in choices:
        wanted = ", ".join(f'"{one}"' for one in choices[:-1]) + f' or "{choices[-1]}"'
        raise UsageError(f"{what}: expected {wanted}, found {value!r}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` for a known name like this one; empty if there is none."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def named_line(error: BaseException) -> str:
    """An error's type and message, on one line; the message alone for the errors above, the type alone without one."""
    name, text = type(error).__name__, " ".join(str(error).split())
    return text if isinstance(error, PoochError) else f"{name}: {text}" if text else name

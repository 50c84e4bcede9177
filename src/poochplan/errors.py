"""Errors that reach a person: one line that says what was expected, what was found and what to do.

Every error carries the exit code the command line ends with; the CLI has one catch site
(:func:`poochplan.cli.main`).
"""

from __future__ import annotations


class PoochError(Exception):
    """Base of every error raised on purpose; ``str(error)`` is one line for a person."""

    exit_code = 1

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # names from files and messages of libraries may have several


class UsageError(PoochError):
    """The request itself cannot be read: an unknown workload, an unreadable budget, a missing file."""

    exit_code = 2


class InputFileError(PoochError):
    """A profile or plan file that is truncated, of another schema, or not what its name says."""


class OutputExistsError(PoochError):
    """An output file exists and ``--force`` (``force=True``) was not given."""


class StepError(PoochError):
    """The user's step cannot be profiled or run: no scalar loss, no gradients, the wrong device."""


class ModelMismatchError(PoochError):
    """A plan or profile was made for another model; the message names the first layer that differs."""


class DivergenceError(PoochError):
    """A step diverged from the plan; of ``pooch run``, or where ``on_divergence="error"`` was asked for."""

    exit_code = 6


class BudgetExceededError(PoochError):
    """A step that followed its plan took more than its budget; of ``pooch run``, or where that is to be an error.

    ``peak_bytes`` is what it took.
    """

    exit_code = 5

    def __init__(self, message: str, *, peak_bytes: int) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes


class SpillError(PoochError):
    """The spill directory cannot be used: missing, not writable, a tmpfs, or a read that failed."""


class NativeError(PoochError):
    """A compiled part cannot be built or loaded; everything else works without it."""


class AllocatorError(NativeError):
    """The compiled allocator cannot be built, loaded or used."""


class SolverError(PoochError):
    """An ILP solver died; the message names it and what to do."""


class InfeasibleError(PoochError):
    """No plan fits the budget.

    ``smallest_budget_bytes`` is the smallest budget for which a plan was found.
    """

    exit_code = 3

    def __init__(self, message: str, *, smallest_budget_bytes: int) -> None:
        super().__init__(message)
        self.smallest_budget_bytes = smallest_budget_bytes


class GapError(PoochError):
    """The search ended before the step was as near to its proven bound as was asked for; the best plan was written."""

    exit_code = 4


def named_line(error: BaseException) -> str:
    """What an error says, on one line, behind its type; one of the above, or one without words, as it is."""
    name, text = type(error).__name__, " ".join(str(error).split())
    return text if isinstance(error, PoochError) else f"{name}: {text}" if text else name

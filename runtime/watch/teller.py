"""Teller: what a session says while it runs: one line on stderr, rewritten in place on a terminal, and warnings."""

from __future__ import annotations

import sys
import warnings

from poochplan.units import format_bytes

from .users_line import users_line


class Teller:
    """State: what the line says now, and what it has warned of. ``is_quiet``: it says nothing but warnings."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self._said = ""
        self._told_of: set[str] = set()

    def say(self, text: str) -> None:
        """The line is this from now on. Off a terminal each new text is a line of its own."""
        if self.is_quiet or text == self._said:
            return
        is_terminal = sys.stderr.isatty()
        padding = " " * max(0, len(self._said) - len(text)) if is_terminal else ""
        print(f"poochplan: {text}{padding}", end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)
        self._said = text

    def warn(self, text: str) -> None:
        """A warning that cites the user's line; the same one comes once."""
        if text not in self._told_of:
            self._told_of.add(text)
            warnings.warn(f"poochplan: {text}", RuntimeWarning, stacklevel=users_line())

    def end(self) -> None:
        """What comes next is on a line of its own."""
        if self._said and not self.is_quiet and sys.stderr.isatty():
            print(file=sys.stderr)


def no_arena(reason: str) -> str:
    """Why planned steps take no memory from an arena, where one was asked for."""
    return f"planned steps take their memory from torch's allocator, and not from one arena: {reason}"


def arena_given_up(peak_bytes: int, budget_bytes: int) -> str:
    """That the arena made a step exceed its budget."""
    return (
        f"planned steps take their memory from torch's allocator from now on: with the whole arena one took "
        f"{format_bytes(peak_bytes)} of a budget of {format_bytes(budget_bytes)}, without it they are within"
    )


def host_is_full(size_bytes: int, reason: str) -> str:
    """That there is no room to swap to, and what becomes of the values."""
    room = f"there is no room for {format_bytes(size_bytes)} of swapped values ({reason})"
    return f"{room}; those that find none are kept"

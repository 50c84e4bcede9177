"""Teller: what a session says while it runs: one line on stderr, rewritten in place on a terminal, and warnings, which
cite the user's line: which frame of theirs led here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

from poochplan.units import format_bytes

_NOT_THEIRS = ("poochplan", "torch", "contextlib", "weakref")
_SUSPENDS = 0x20 | 0x80 | 0x200
"""``CO_GENERATOR``, ``CO_COROUTINE``, ``CO_ASYNC_GENERATOR``: such a frame is off the stack now and then."""


def users_line() -> int:
    """``stacklevel`` for a warning of the caller's: of the first frame outside this package and torch.

    1, the caller itself, where there is none.
    """
    return next((level for level, frame in enumerate(_stack(sys._getframe(1)), 1) if _is_theirs(frame)), 1)


class Place(NamedTuple):
    """A call in a frame of the user's. It does not hold the frame."""

    frame: int
    code: CodeType | None
    instruction: int

    @classmethod
    def of_caller(cls) -> Place:
        """Where the user has called what leads here."""
        for frame in _stack(sys._getframe(1)):
            if _is_theirs(frame):
                return cls(id(frame), frame.f_code, frame.f_lasti)
        return cls(0, None, -1)

    @property
    def is_left(self) -> bool:
        """Whether its frame has ended, or has come to the same call once more, as seen from this thread.

        A frame that may be suspended is never taken for ended. One of the same function may have the address of one
        that has ended; then it stands at that very call.
        """
        if self.code is None or self.code.co_flags & _SUSPENDS:
            return False
        return not any(
            id(frame) == self.frame and frame.f_code is self.code and frame.f_lasti != self.instruction
            for frame in _stack(sys._getframe(1))
        )


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_theirs(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THEIRS


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


def arena_too_large(peak_bytes: int, budget_bytes: int, *, is_smaller: bool) -> str:
    """That a step exceeded its budget with the arena, and where the next steps take their memory from."""
    now = "a smaller arena from now on" if is_smaller else "torch's allocator from now on"
    took = f"with the whole arena one took {format_bytes(peak_bytes)} of a budget of {format_bytes(budget_bytes)}"
    return f"planned steps take their memory from {now}: {took}, without it they are within"


def host_is_full(size_bytes: int, reason: str) -> str:
    """That there is no room to swap to, and what becomes of the values."""
    room = f"there is no room for {format_bytes(size_bytes)} of swapped values ({reason})"
    return f"{room}; those that find none are kept"

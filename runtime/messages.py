"""Messages of a running session: its progress and its warnings. Progress is one line on stderr, which is rewritten in
place on a terminal. Warnings cite the user's line: the frame of the user's code that led here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

_NOT_THEIRS = ("poochplan", "torch", "contextlib", "weakref")
_SUSPENDS = 0x20 | 0x80 | 0x200
"""``CO_GENERATOR``, ``CO_COROUTINE``, ``CO_ASYNC_GENERATOR``: such a frame leaves the stack from time to time."""


def users_line() -> int:
    """``stacklevel`` for a warning of the caller: that of the first frame outside this package and torch.

    It is 1, the caller itself, if there is no such frame.
    """
    return next((level for level, frame in enumerate(_stack(sys._getframe(1)), 1) if _is_theirs(frame)), 1)


def warn(text: str) -> None:
    """Warns, and cites the user's line."""
    warnings.warn(f"poochplan: {text}", RuntimeWarning, stacklevel=users_line())


def warn_once(text: str) -> None:
    """The same, once in a process for each text; nothing if it is empty."""
    if text and text not in _told:
        _told.add(text)
        warn(text)


_told: set[str] = set()


class CallSite(NamedTuple):
    """A call in a frame of the user's code. It does not keep the frame alive."""

    frame: int
    code: CodeType | None
    instruction: int

    @classmethod
    def of_caller(cls) -> CallSite:
        """The place of the user's call that led here."""
        for frame in _stack(sys._getframe(1)):
            if _is_theirs(frame):
                return cls(id(frame), frame.f_code, frame.f_lasti)
        return cls(0, None, -1)

    @property
    def is_left(self) -> bool:
        """Whether its frame has ended, or has reached the same call again, as seen from this thread.

        A frame that may be suspended never counts as ended. A new frame of the same function may have the address of
        one that has ended; then it is at that very call.
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


class Messages:
    """State: the present text of the line, and the warnings given so far. ``is_quiet``: only warnings are given."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self._said = ""
        self._told_of: set[str] = set()

    def say(self, text: str) -> None:
        """Sets the line's text. Where stderr is no terminal, each new text is a line of its own."""
        if self.is_quiet or text == self._said:
            return
        is_terminal = sys.stderr.isatty()
        padding = " " * max(0, len(self._said) - len(text)) if is_terminal else ""
        print(f"poochplan: {text}{padding}", end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)
        self._said = text

    def warn(self, text: str) -> None:
        """Gives a warning that cites the user's line. The same warning comes once."""
        if text not in self._told_of:
            self._told_of.add(text)
            warn(text)

    def end(self) -> None:
        """Ends the line: the next text begins a new one."""
        if self._said and not self.is_quiet and sys.stderr.isatty():
            print(file=sys.stderr)

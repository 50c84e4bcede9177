"""Messages of a running session: its progress and its warnings. Progress is one line on stderr, which is rewritten in
place on a terminal. Warnings cite the user's line: the frame of the user's code that led here.

Nothing here raises: a message for which there is no stderr is lost, and a loop goes on. A warning that the user's
filters make an error is a line on stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from poochplan.guard import raises

_NOT_THEIRS = ("poochplan", "torch", "contextlib", "weakref", "concurrent", "threading")
HOST_IS_FULL = (
    "there is no room for {} of swapped values ({}): those that find none stay on the device, and steps may exceed the "
    "budget; free disk space or host memory, or name another spill_dir"
)
_SUSPENDS = 0x20 | 0x80 | 0x200
"""``CO_GENERATOR``, ``CO_COROUTINE``, ``CO_ASYNC_GENERATOR``: such a frame leaves the stack from time to time."""


def users_line() -> int:
    """``stacklevel`` for a warning of the caller: that of the first frame outside this package and torch.

    It is 1, the caller itself, if there is no such frame.
    """
    return next((level for level, frame in enumerate(_stack(sys._getframe(1)), 1) if _is_theirs(frame)), 1)


def warn(text: str, category: type[Warning] = RuntimeWarning) -> bool:
    """Warns, and cites the user's line. Returns false if the user's filters ignore it."""
    line, level = f"poochplan: {text}", users_line()
    try:
        if _action(line, category, sys._getframe(level - 1)) == "ignore":
            return False
        with contextlib.redirect_stderr(None) if _is_closed() else contextlib.nullcontext():
            warnings.warn(line, category, stacklevel=level)
    except Warning:
        if raises():
            raise
        _write(f"{line}\n")
    except Exception:  # a stderr that is closed, or something else that cannot be written to
        return True
    return True


def _action(line: str, category: type[Warning], frame: FrameType) -> str:
    """What the user's filters do with such a warning from that frame."""

    def fits(pattern: Any, found: str) -> bool:
        return pattern is None or (pattern == found if isinstance(pattern, str) else bool(pattern.match(found)))

    module = str(frame.f_globals.get("__name__", ""))
    for action, message, kind, where, number in warnings.filters:
        is_there = fits(where, module) and number in (0, frame.f_lineno)
        if is_there and issubclass(category, kind) and fits(message, line):
            return action
    return "default"


def _write(text: str) -> None:
    """Writes to the stderr of this moment. One that is missing, closed, full or broken gets nothing."""
    try:
        if sys.stderr is not None and not _is_closed():
            sys.stderr.write(text)
            sys.stderr.flush()
    except Exception:  # any object may stand there
        return


def _is_closed() -> bool:
    """Whether the descriptor of stderr is closed. Python would keep what is written to it, and try again as the process
    ends, whose exit code would then be 120.
    """
    try:
        os.fstat(sys.stderr.fileno())
    except io.UnsupportedOperation:  # it has none
        return False
    except OSError:
        return True
    except Exception:  # any object may stand there, or none
        return False
    return False


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except Exception:  # any object may stand there, or none
        return False


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
    """State: the present text of the line, whether the cursor is still on it, and the warnings given so far.
    ``is_quiet``: only warnings are given.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self._said = ""
        self._is_on_line = False
        self._told_of: set[str] = set()

    def say(self, text: str) -> None:
        """Sets the line's text, if there is any. Where stderr is no terminal, each new text is a line of its own."""
        if self.is_quiet or text in ("", self._said):
            return
        is_terminal = _is_terminal()
        end, padding = "\r" if is_terminal else "\n", " " * max(0, len(self._said) - len(text)) * self._is_on_line
        _write(f"poochplan: {text}{padding}{end}")
        self._said, self._is_on_line = text, is_terminal

    def warn(self, text: str) -> None:
        """Gives a warning that cites the user's line. The same warning comes once. While progress is printed, a warning
        that the user's filters ignore is a line like progress, which stays.
        """
        if text in self._told_of:
            return
        self._told_of.add(text)
        if not warn(text) and not self.is_quiet:
            self.end()
            _write(f"poochplan: {text}\n")

    def end(self) -> None:
        """Ends the line: the next text begins a new one."""
        if self._is_on_line and not self.is_quiet:
            _write("\n")
        self._is_on_line = False

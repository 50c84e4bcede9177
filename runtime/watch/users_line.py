"""The user's line: which frame of theirs led here, for warnings to cite, and whether it is still running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

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

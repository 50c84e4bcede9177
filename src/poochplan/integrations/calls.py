"""Calls: whether one that was running is still, without holding on to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple


class Call(NamedTuple):
    """A call on this thread's stack."""

    number: int
    code: CodeType

    @classmethod
    def of_method(cls, kind: type) -> Call | None:
        """The innermost running call of a method whose ``self`` is of that kind; None where there is none."""
        for frame in _running():
            if isinstance(frame.f_locals.get("self"), kind):
                return cls(id(frame), frame.f_code)
        return None

    def is_running(self) -> bool:
        """Whether it has neither returned nor raised. Asked on its own thread."""
        return any(id(frame) == self.number and frame.f_code is self.code for frame in _running())


def _running() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back

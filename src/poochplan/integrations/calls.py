"""Calls: whose one is, and whether one that was running is still, without holding on to it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

from poochplan.errors import UsageError

Owner = TypeVar("Owner")


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


def owner_of_method(kind: type[Owner]) -> Owner | None:
    """The ``self`` of the innermost running method that has one of that kind; None where there is none."""
    for frame in _running():
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
    return None


def check_only_one(callback: object, callbacks: Iterable[object]) -> None:
    """Raises ``UsageError`` where a trainer has more than one callback of that class: a loop has one budget."""
    kind = type(callback)
    if sum(isinstance(one, kind) for one in callbacks) > 1:
        raise UsageError(f"callbacks: expected one {kind.__name__}, found several; leave all but one of them out")


def _running() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back

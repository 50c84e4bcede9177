"""The shared part of the callbacks of all trainers: a session for each training, and the model that a trainer calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch

from poochplan.errors import UsageError
from poochplan.online.auto import auto, check_budget
from poochplan.runtime.metering.census import wrapper_of
from poochplan.runtime.session import Session
from poochplan.torch_private.compiler_internals import is_compiled

Owner = TypeVar("Owner")


class PlansTraining:
    """The part of a callback that is the same for all trainers. State: ``session``, the last one that was opened."""

    def __init__(self, *, budget: str | int | float, **options: Any) -> None:
        check_budget(budget)
        self.session: Session | None = None
        self._options: dict[str, Any] = {"budget": budget, **options}

    def close(self) -> None:
        if self.session is not None:
            self.session.close()

    def _begin(self, model: torch.nn.Module, optimizer: Any, callbacks: Iterable[object]) -> Session:
        """Ends the last session and opens another. Raises if ``callbacks`` have a second one of this class."""
        self.close()
        kind = type(self)
        if sum(isinstance(one, kind) for one in callbacks) > 1:
            raise UsageError(f"callbacks: expected one {kind.__name__}, found several; leave all but one of them out")
        session = auto(model, optimizer, **self._options)
        session.__enter__()
        self.session = session
        return session


class Call(NamedTuple):
    """A call on this thread's stack, without a reference to its frame."""

    number: int
    code: CodeType

    @classmethod
    def of_method(cls, kind: type) -> Call | None:
        """The innermost running call of a method whose ``self`` is of that kind; None if there is none."""
        for frame in _running():
            if isinstance(frame.f_locals.get("self"), kind):
                return cls(id(frame), frame.f_code)
        return None

    def is_running(self) -> bool:
        """Whether it has neither returned nor raised. Only its own thread may ask."""
        return any(id(frame) == self.number and frame.f_code is self.code for frame in _running())


def owner_of_method(kind: type[Owner]) -> Owner | None:
    """The ``self`` of the innermost running method that has one of that kind; None if there is none."""
    return next((found for frame in _running() if isinstance(found := frame.f_locals.get("self"), kind)), None)


def _running() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def called_by(trainer: object, model: torch.nn.Module) -> torch.nn.Module:
    """The model that transformers' Trainer calls, such as the compiled one of ``torch_compile=True``."""
    wrapped = getattr(trainer, "model_wrapped", None)
    return wrapped if isinstance(wrapped, torch.nn.Module) and is_compiled(wrapped) else outermost(model)


def outermost(model: torch.nn.Module) -> torch.nn.Module:
    """The data-parallel wrapper around the model; without one, the model."""
    return wrapper_of(model) or model

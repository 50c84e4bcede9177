"""The shared part of the callbacks of all trainers: a session for each training, and the model that a trainer calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeVar

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


def running_method(kind: type[Owner]) -> tuple[Owner | None, Callable[[], bool]]:
    """The ``self`` of the innermost running method that has one of that kind; None if there is none. And a function
    that tells whether the call has neither returned nor raised. It holds no frame, and only this thread may call it.
    """
    for frame in _running():
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            return owner, partial(_is_running, id(frame), frame.f_code)
    return None, lambda: True


def _is_running(number: int, code: CodeType) -> bool:
    return any(id(frame) == number and frame.f_code is code for frame in _running())


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

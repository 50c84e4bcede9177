"""One session at a time on a thread, and for a model: of two, the hooks of the later would take all that is saved."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from poochplan.errors import UsageError


class OpenSession(Protocol):
    """What is looked at of a session."""

    model: torch.nn.Module

    @property
    def thread(self) -> int | None:
        """The thread whose steps follow the plan; None while it is away."""


_ENTERED: weakref.WeakSet[OpenSession] = weakref.WeakSet()


def check_no_session(what: str, model: torch.nn.Module) -> None:
    """Raises ``UsageError`` when ``what`` would meet a session on this thread, or one for ``model``."""
    for session in tuple(_ENTERED):
        name = type(session.model).__name__
        if session.thread == threading.get_ident():
            raise UsageError(
                f"{what}: expected no open session on this thread, found one for {name}; leave its with block before"
            )
        if session.thread is not None and session.model is model:
            raise UsageError(
                f"{what}: expected no open session for this {name}, found one on another thread; "
                "wait until its with block has ended"
            )


@contextmanager
def entered(session: OpenSession) -> Iterator[None]:
    """Within the block it is the session of its thread and model; raises ``UsageError`` where there is one."""
    check_no_session("apply()", session.model)
    _ENTERED.add(session)
    try:
        yield
    finally:
        _ENTERED.discard(session)

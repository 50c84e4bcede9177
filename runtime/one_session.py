"""One session at a time on a thread, and for a model: of two, the hooks of the later would take all that is saved."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from poochplan.errors import UsageError

from .watch.users_line import users_line


class OpenSession(Protocol):
    """What is looked at of a session."""

    models: Mapping[str, torch.nn.Module]

    leave: Callable[[], object]
    """Ends it."""

    @property
    def thread(self) -> int | None:
        """The thread whose steps follow the plan; None while it is away."""

    @property
    def is_left(self) -> bool:
        """Whether what entered it has ended without leaving it."""


_ENTERED: weakref.WeakSet[OpenSession] = weakref.WeakSet()


def check_no_session(what: str, models: Iterable[torch.nn.Module]) -> None:
    """Raises ``UsageError`` when ``what`` would meet a session on this thread, or one for one of ``models``."""
    own = {id(model) for model in models}
    for session in tuple(_ENTERED):
        if session.thread == threading.get_ident() and session.is_left:
            _end(session, what)
            continue
        name = " and ".join(type(model).__name__ for model in session.models.values())
        if session.thread == threading.get_ident():
            raise UsageError(
                f"{what}: expected no open session on this thread, found one for {name}; leave its with block before"
            )
        if session.thread is not None and own.intersection(map(id, session.models.values())):
            raise UsageError(
                f"{what}: expected no open session for this {name}, found one on another thread; "
                "wait until its with block has ended"
            )


def is_in_session(model: torch.nn.Module) -> bool:
    """Whether what this thread does now may be a session's, or the model has one."""
    if not len(_ENTERED):
        return False
    here = threading.get_ident()
    return any(
        session.thread is not None and (session.thread == here or any(own is model for own in session.models.values()))
        for session in tuple(_ENTERED)
    )


def _end(session: OpenSession, what: str) -> None:
    """One that was left open: after an exception, by code that enters it and has no ``with`` to leave it again."""
    name = " and ".join(type(model).__name__ for model in session.models.values())
    session.leave()
    warnings.warn(
        f"poochplan: {what} found a session for {name} still open, though what entered it has ended, and has closed "
        "it; enter sessions with a with statement, or leave them in a finally",
        RuntimeWarning,
        stacklevel=users_line(),
    )


@contextmanager
def entered(session: OpenSession) -> Iterator[None]:
    """Within the block it is the session of its thread and model; raises ``UsageError`` where there is one."""
    check_no_session("apply()", session.models.values())
    _ENTERED.add(session)
    try:
        yield
    finally:
        _ENTERED.discard(session)

"""One session at a time on a thread, and for a model: of two, the hooks of the later would take all that is saved."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from poochplan.errors import UsageError


class OpenSession(Protocol):
    """What is looked at of a session."""

    models: Mapping[str, torch.nn.Module]

    @property
    def thread(self) -> int | None:
        """The thread whose steps follow the plan; None while it is away."""


_ENTERED: weakref.WeakSet[OpenSession] = weakref.WeakSet()


def check_no_session(what: str, models: Iterable[torch.nn.Module]) -> None:
    """Raises ``UsageError`` when ``what`` would meet a session on this thread, or one for one of ``models``."""
    own = {id(model) for model in models}
    for session in tuple(_ENTERED):
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


@contextmanager
def entered(session: OpenSession) -> Iterator[None]:
    """Within the block it is the session of its thread and model; raises ``UsageError`` where there is one."""
    check_no_session("apply()", session.models.values())
    _ENTERED.add(session)
    try:
        yield
    finally:
        _ENTERED.discard(session)

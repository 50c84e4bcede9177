"""The open sessions of the process: which thread and which model has one."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from poochplan.errors import UsageError
from poochplan.runtime.messages import warn


class OpenSession(Protocol):
    """What is asked of an :class:`~.attachment.Attachment` here."""

    models: Mapping[str, torch.nn.Module]
    leave: Callable[[], object]

    @property
    def thread(self) -> int | None: ...

    @property
    def is_left(self) -> bool: ...

    def is_forked(self) -> None: ...


ENTERED: weakref.WeakSet[OpenSession] = weakref.WeakSet()
"""The open sessions. A thread, and a model, can have one: the hooks of a later one would take all saved tensors."""


def _leave_in_child() -> None:
    """In a forked process, such as a data loader's worker, no thread copies. So its steps run in-core."""
    for session in tuple(ENTERED):
        session.is_forked()


if hasattr(os, "register_at_fork"):  # not on Windows, where plans are made
    os.register_at_fork(after_in_child=_leave_in_child)


def check_no_session(what: str, models: Iterable[torch.nn.Module]) -> None:
    """Raises ``UsageError`` if ``what`` would overlap with a session on this thread, or for one of ``models``."""
    own, here = {id(model) for model in models}, threading.get_ident()
    for session in tuple(ENTERED):
        name = " and ".join(type(model).__name__ for model in session.models.values())
        if session.thread == here and session.is_left:  # after an exception, by code that enters it without ``with``
            session.leave()
            warn(
                f"{what} found a session for {name} still open after the code that entered it had ended, and has "
                "closed it; enter sessions with a with statement, or leave them in a finally"
            )
        elif session.thread == here:
            raise UsageError(
                f"{what}: expected no open session on this thread, found one for {name}; leave its with block before"
            )
        elif session.thread is not None and own.intersection(map(id, session.models.values())):
            raise UsageError(
                f"{what}: expected no open session for this {name}, found one on another thread; "
                "wait until its with block has ended"
            )


def is_in_session(model: torch.nn.Module) -> bool:
    """Whether code on this thread may now run in a session, or the model has one."""
    here = threading.get_ident()
    return any(
        session.thread is not None and (session.thread == here or any(own is model for own in session.models.values()))
        for session in tuple(ENTERED)
    )

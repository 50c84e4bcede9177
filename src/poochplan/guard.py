"""Guard: an error of ours never ends a loop that trains.

A guard stands where torch and Python call us while a step runs: at hooks, modes and callbacks. If anything of ours
raises there, the session stands aside: what was called plainly is called, one line says why, and later steps are plain.
What is not ours passes unchanged: out of memory, an error of the user's code, autograd's own error about a write, and
what the user asked to be an error. An interrupt (Ctrl-C) amid our code passes too, and the session is closed.

Functions of this module are the outermost ones that torch calls. So each only tries what it guards.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from poochplan.errors import (
    AuditError,
    BudgetExceededError,
    DivergenceError,
    NativeError,
    PoochError,
    is_out_of_memory,
    named_line,
)

ErrorT = TypeVar("ErrorT", bound=BaseException)

RAISES = os.environ.get("POOCH_RAISES") == "1"
"""Whether an error of ours is raised after all, so that tests see it."""
_USERS = "poochplan_passes"


def raises() -> bool:
    return RAISES


def users(error: ErrorT) -> ErrorT:
    """The error, which is the user's own: a guard lets it pass."""
    setattr(error, _USERS, True)
    return error


def is_ours(error: BaseException) -> bool:
    """Whether it is no error of the user's, and is not to be raised."""
    return not (RAISES or is_out_of_memory(error) or getattr(error, _USERS, False))


def is_about_arguments(error: BaseException) -> bool:
    """Whether it tells, before the first step, what the user has asked for and cannot have."""
    return isinstance(error, PoochError) and not isinstance(error, NativeError)


class Guard:
    """State: whether an error of ours, or an interrupt amid our code, has come: the session has failed by it.

    ``stands_aside`` is called once, with a line about it, which is empty for an interrupt. It must not raise.
    """

    def __init__(self, stands_aside: Callable[[str], None]) -> None:
        self._stands_aside = stands_aside
        self.asked_for: tuple[type[Exception], ...] = (AuditError, BudgetExceededError, DivergenceError)
        """Errors that the user has asked for."""
        self.has_failed = False
        self.modes = weakref.WeakSet[Any]()
        """The dispatch modes made while it stood on their thread."""

    def takes(self, error: BaseException) -> bool:
        """Whether the error is ours. Then the session stands aside; else it is to be raised again, as is an interrupt,
        which the session does not outlive.
        """
        if getattr(error, _USERS, False):
            return False
        is_error = isinstance(error, Exception)
        if is_error and (not is_ours(error) or isinstance(error, self.asked_for)):
            return False
        if not self.has_failed:
            self.has_failed = True
            self._stands_aside(f"{named_line(error)} ({_place_of(error)})" if is_error else "")
        return is_error


def _place_of(error: BaseException) -> str:
    """The function that raised, and its place: ``at_save in step_policies/follow.py:105``."""
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [pair for pair in frames if str(pair[0].f_globals.get("__name__", "")).startswith("poochplan.")] or frames
    if not ours:
        return "no place is known"
    code, line = ours[-1][0].f_code, ours[-1][1]
    return f"{code.co_name} in {'/'.join(Path(code.co_filename).parts[-2:])}:{line}"


_HERE: dict[int, Guard] = {}
"""The guard of the session on each thread."""


def stand(guard: Guard) -> Callable[[], None]:
    """The guard stands on this thread. Returns the function that ends this."""
    thread = threading.get_ident()
    _HERE[thread] = guard

    def leave() -> None:
        if _HERE.get(thread) is guard:
            del _HERE[thread]

    return leave


def guard_here() -> Guard | None:
    """The guard of the session on this thread."""
    return _HERE.get(threading.get_ident())


def nothing(*_: Any) -> None:
    """What is plainly done in place of most callbacks."""


def guarded(call: Callable[..., Any], plainly: Callable[..., Any] = nothing) -> Callable[..., Any]:
    """``call``, guarded by the guard on this thread; ``plainly`` gets the same arguments if it fails."""
    guard = guard_here()
    if guard is None:
        return call

    def guarded_call(*args: Any) -> Any:
        try:
            return call(*args)
        except BaseException as error:
            if not guard.takes(error):
                raise
        return plainly(*args)

    guarded_call.__wrapped__ = call  # type: ignore[attr-defined]
    return guarded_call


class Once:
    """A call of the user's code or torch's, inside one of ours. State: whether it has returned, and what; or the
    identity of its error, which itself would hold the frames that hold this.
    """

    __slots__ = ("_call", "has_returned", "raised", "result")

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.raised = 0
        self.has_returned = False
        self.result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self._call(*args, **kwargs)
        except BaseException as error:
            self.raised = id(error)
            raise
        self.has_returned = True
        return self.result


def _raise_theirs(error: BaseException, raised: int) -> NoReturn:
    """Raises the user's error of that identity, during which ours may have come. No frame keeps it: with its traceback
    it would hold the step's tensors until the collector runs.
    """
    found: BaseException | None = error
    try:
        while found is not None and id(found) != raised:
            found = found.__context__
        if found is None:
            raise error
        raise found from found.__cause__
    finally:
        del error, found


def guarded_around(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """``around(run)`` returns a callable that calls ``run``, the user's or torch's. The same, guarded: the call is run
    in any case, once, and its error passes.
    """
    guard = guard_here()
    if guard is None:
        return around

    def guarded_wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_run(*args: Any, **kwargs: Any) -> Any:
            once = Once(run)
            try:
                return around(once)(*args, **kwargs)
            except BaseException as error:
                if once.raised == id(error):
                    raise
                if once.raised:
                    _raise_theirs(error, once.raised)
                if not guard.takes(error):
                    raise
            return once.result if once.has_returned else run(*args, **kwargs)

        return guarded_run

    return guarded_wrap


def guarded_dispatch(method: Callable[..., Any]) -> Callable[..., Any]:
    """The ``__torch_dispatch__`` of a class of modes, which runs each op by ``self.run_op``: guarded by the mode's own
    ``guard``. The op runs in any case, once, and its error passes. A mode whose session has failed passes ops on.
    """

    def guarded_op(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        guard = self.guard
        if guard is None:
            return method(self, func, types, args, kwargs)
        if guard.has_failed:
            return func(*args, **(kwargs or {}))
        self.outcome = outcome = None
        try:
            return method(self, func, types, args, kwargs)
        except BaseException as error:
            outcome = self.outcome
            if outcome is not None and outcome[0] == id(error):
                raise
            if outcome is not None and outcome[0]:
                _raise_theirs(error, outcome[0])
            if not guard.takes(error):
                raise
        finally:
            self.outcome = None
        return func(*args, **(kwargs or {})) if outcome is None else outcome[1]

    return guarded_op

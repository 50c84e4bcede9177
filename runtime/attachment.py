"""Attachment: attaches an engine to models and torch for the length of a block. It recognises which calls are steps."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from poochplan.errors import UsageError
from poochplan.runtime.arena.library import fresh_memory
from poochplan.runtime.devices.cuda import refuse_capture, refuse_graphs
from poochplan.runtime.devices.device import Device
from poochplan.runtime.engine.cursor import NO_EVENTS, StepEvents
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.mechanism import Rebuild, rebuild_together
from poochplan.runtime.step_policies.step_policy import Chooser
from poochplan.runtime.watch.teller import Place, users_line
from poochplan.tensors.modes import (
    around_calls,
    around_compiled,
    uncompiled_hooks,
    where_forward_raises,
)
from poochplan.tensors.operators import past_first_calls
from poochplan.tensors.signatures import input_signature, tensor_leaves
from poochplan.tensors.storages import plain_storage
from poochplan.torch_private.tensor_internals import has_topmost_hooks, in_backward, intercept_autograd, stand_aside

from .compiled.deferred_unpack import deferring
from .compiled.inductor import compiled_deferring

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
Tell = Callable[[torch.optim.Optimizer], None]
AroundCall = Callable[[str, Callable[..., Any]], Callable[..., Any]]


def own_hooks(attachment: Attachment) -> Hooks:
    """Returns the engine's own hooks unchanged."""
    return attachment.engine.pack, attachment.engine.unpack


class Attachment:
    """A context manager. States: *new*, *open* (inside the block), *away* (temporarily in-core), *closed*.

    After the block, handles that are still alive can be unpacked (backward outside the ``with``). The host tier is
    released with the last of them, and the C library's allocator keeps freed memory again
    (:mod:`poochplan.tensors.host_memory`).

    Parameters
    ----------
    models: by name, each with its own hooks; a single one has the name "".
    kind: of their device.
    open_device: called when the block is entered.
    chooser: gives each segment its step policy.
    elsewhere: called with a model that is called with gradients on another thread.
    rebuild: the engine's.
    hooks: returns the hooks that autograd calls; by default the engine's own. The engine exists when it is called.
    around_call: returns the callable that replaces a compiled callable of a model.
    gives_up: whether values leave the device from the first step on; otherwise :meth:`memory_is_short` says when they
        do.
    apart: whether each segment belongs to one of the models alone; then only that model's parameters are examined.
    events: called at the events of a step.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        kind: str,
        open_device: Callable[[], Device],
        chooser: Chooser,
        *,
        elsewhere: Callable[[str], None] = lambda _: None,
        rebuild: Rebuild = rebuild_together,
        hooks: Callable[[Attachment], Hooks] = own_hooks,
        around_call: AroundCall = lambda _, call: call,
        gives_up: bool = True,
        apart: bool = True,
        events: StepEvents = NO_EVENTS,
    ) -> None:
        self.models = models
        self.whole = together(models)
        self._kind = kind
        self._open_device = open_device
        self._chooser = chooser
        self._elsewhere = elsewhere
        self._rebuild = rebuild
        self._make_hooks = hooks
        self._gives_up = gives_up
        self._events = events
        self._parts = models if apart and self.whole is not models.get("") else {}
        self._around_call = around_call
        self.is_wanted: Callable[[], bool] = lambda: True
        """Called when a segment is about to begin. If it returns false, ``abandoned`` is called."""
        self.abandoned: Callable[[], None] = lambda: None
        """Leaves the block."""
        self.state: Literal["new", "open", "away", "closed"] = "new"
        self.place = Place.of_caller()
        self.leave: Callable[[], object] = self.__exit__
        """Ends the block if no caller has left it."""
        self._is_hooked = self._is_short = False
        self._thread: int | None = None
        self._stack = ExitStack()
        self._held = ExitStack()
        """Resources that last until the last handle is gone: the device, and how its memory is released."""

    def __enter__(self) -> Attachment:
        self.place = Place.of_caller()
        past_first_calls()
        with ExitStack() as stack:  # undone if one of these fails
            if self._kind == "cuda":
                refuse_graphs(self.whole)
            stack.enter_context(entered(self))
            stack.callback(self._let_go)
            if self._gives_up:
                self.memory_is_short()
            self.device = self._held.enter_context(closing(self._open_device()))
            self.engine = Engine(
                self._chooser,
                self.device,
                self.whole,
                rebuild=self._rebuild,
                parts=self._parts,
                on_idle=self._idle,
                events=self._events,
            )
            stack.enter_context(compiled_deferring(self.whole, self._kind))
            stack.enter_context(around_compiled(self.whole, self._without_modes))
            for name, model in self.models.items():
                stack.enter_context(around_calls(model, partial(self._forward_begins, name)))
                stack.enter_context(where_forward_raises(model, self._forward_raised))
            stack.enter_context(intercept_autograd(self._around_backward))
            stack.enter_context(around_optimizer_steps(self.whole, self._optimizer_steps, self._optimizer_stepped))
            pack, unpack = self._make_hooks(self)
            hooks = deferring(pack, unpack, self.engine.may_wait, self.whole, self._kind)
            self._hooks = uncompiled_hooks(*hooks)
            self.state, self._thread = "open", threading.get_ident()
            stack.enter_context(stand_aside(self._hooks))
            stack.enter_context(self._hooked())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.state = "closed"
        self._stack.close()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """A block with the hooks on. Hooks belong to a thread: on another one they cannot be removed."""
        self._hooks.__enter__()
        self._is_hooked = True
        try:
            yield
        finally:
            if self._is_hooked and threading.get_ident() == self._thread:
                self.take_hooks_off()

    @property
    def is_left(self) -> bool:
        """Whether it was left open: the code that entered its block has ended."""
        return self.state in ("open", "away") and self.place.is_left

    @property
    def thread(self) -> int | None:
        """The thread whose steps are observed, from the block's beginning to its end, except while it is away."""
        return self._thread if self.state == "open" else None

    def memory_is_short(self) -> None:
        """Values leave the device from now on, so freed memory is returned to the system. Idempotent."""
        if self._kind == "cpu" and not self._is_short:
            self._is_short = True
            self._held.enter_context(fresh_memory())

    def take_hooks_off(self) -> None:
        """Removes the hooks, unless other hooks lie on top of them. Then they do nothing from now on, and are removed
        when they are on top.
        """
        if has_topmost_hooks(self._hooks):
            self._hooks.__exit__()
            self._is_hooked = False

    def ends_here(self) -> bool:
        """Whether its purpose has ended although nothing left the block. If so, it is left now."""
        if self.state != "open" or self.is_wanted():
            return False
        self.abandoned()
        return True

    def begin_segment(self, name: str | None = None) -> None:
        """The caller begins a segment here, and will announce all later ones.

        It belongs to the model of that name, or to the one that is called first.
        """
        self.engine.cursor.announced()
        self.engine.begin(name, announced=True)

    def settle(self) -> None:
        """Called between segments. Finishes the last segment's reports now, and not when the next one begins."""
        if not self.engine.cursor.is_open and self.engine.segment.number:
            self.engine.tell_end()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Steps inside run in-core, as if nothing were attached. Use it only on the level of the ``with`` block."""
        if self.state != "open":
            raise UsageError(f"away(): expected an open session, found a {self.state} one")
        if self.engine.segment.used:
            self._events.over(self.engine.segment)
        self._events.resting()
        self.state = "away"
        with self.engine.quiet():
            self._hooks.__exit__()
            self._is_hooked = False
            try:
                yield
            finally:
                if self.state == "away":  # or it has been ended meanwhile
                    self._hooks.__enter__()
                    self._is_hooked = True
                    self.state = "open"

    # -- called by the engine and by torch --------------------------------------------------------------------

    def _is_ours(self) -> bool:
        return self.state == "open" and threading.get_ident() == self._thread

    def _forward_begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A segment begins at the first forward after a backward, or when no value of the last segment is held any
        more.
        """
        if self.state == "away":
            return
        if not torch.is_grad_enabled():
            self._forward_without_gradients()
            return
        if threading.get_ident() != self._thread:
            self._elsewhere(name)
            return
        if in_backward() or self.ends_here():  # a user's checkpoint runs forward again in backward
            return
        if self._kind == "cuda":
            refuse_capture()
        if self.engine.cursor.forward_begins_one():
            self.engine.begin()
            given = [tensor for _, tensor in (*tensor_leaves("", args), *tensor_leaves("", kwargs))]
            self.engine.tape.is_given(given)
            storages = (plain_storage(tensor, self._kind) for tensor in given)
            self.engine.segment.given = [(weakref.ref(one), one.nbytes()) for one in storages if one is not None]
        self.engine.model_is_called(lambda: input_signature(args, kwargs), name)

    def _forward_without_gradients(self) -> None:
        if self._is_ours() and not in_backward():
            if self.engine.segment.used:  # a validation after the step
                self._events.over(self.engine.segment)
            self._events.resting()

    def _forward_raised(self) -> None:
        if self._is_ours() and not in_backward():
            self.engine.forward_raised()
            self._events.departed()

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._is_ours() or in_backward():
                return run(*args, **kwargs)
            with self.engine.backward():
                return run(*args, **kwargs)

        return backward

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_ours():
            self._events.optimizing(optimizer)

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_ours():
            self.engine.optimizer_stepped()
            self._events.stepped(optimizer)

    def _idle(self) -> None:
        if self.state == "closed":
            self._held.close()

    def _let_go(self) -> None:
        if self.state == "new" or not self.engine.cursor.holds_values:  # otherwise with the last of them
            self._held.close()

    def _without_modes(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            run = self._around_call(path, call)
            with self.engine.quiet():
                return run(*args, **kwargs)

        return quiet


def together(models: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """One module that contains all of them under their names; a single one named "" is returned itself.

    Raises ``UsageError`` for a name that a module cannot have.
    """
    if list(models) == [""]:
        return models[""]
    try:
        return torch.nn.ModuleDict(dict(models))
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"models: expected names that modules can have (no dots, not empty), found {sorted(map(str, models))}"
        ) from error


@contextmanager
def around_optimizer_steps(model: torch.nn.Module, before: Tell, after: Tell) -> Iterator[None]:
    """Within the block, calls ``before`` and ``after`` around each step of an optimizer that has a parameter of
    ``model``.
    """

    def told(tell: Tell) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            own = set(map(id, model.parameters()))
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                tell(optimizer)

        return hook

    handles = register_optimizer_step_pre_hook(told(before)), register_optimizer_step_post_hook(told(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_ENTERED: weakref.WeakSet[Attachment] = weakref.WeakSet()
"""The open sessions. A thread, and a model, can have one at a time: with two, the hooks of the later one would take all
saved tensors."""


def check_no_session(what: str, models: Iterable[torch.nn.Module]) -> None:
    """Raises ``UsageError`` if ``what`` would overlap with a session on this thread, or with one for one of
    ``models``.
    """
    own = {id(model) for model in models}
    for session in tuple(_ENTERED):
        if session.thread == threading.get_ident() and session.is_left:
            _end_left(session, what)
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
    """Whether code on this thread may now run in a session, or the model has one."""
    if not len(_ENTERED):
        return False
    here = threading.get_ident()
    return any(
        session.thread is not None and (session.thread == here or any(own is model for own in session.models.values()))
        for session in tuple(_ENTERED)
    )


def _end_left(session: Attachment, what: str) -> None:
    """Ends a session that was left open after an exception, by code that enters it without ``with``."""
    name = " and ".join(type(model).__name__ for model in session.models.values())
    session.leave()
    warnings.warn(
        f"poochplan: {what} found a session for {name} still open after the code that entered it had ended, and has "
        "closed it; enter sessions with a with statement, or leave them in a finally",
        RuntimeWarning,
        stacklevel=users_line(),
    )


@contextmanager
def entered(session: Attachment) -> Iterator[None]:
    """Within the block it is the session of its thread and model. Raises ``UsageError`` if there is one already."""
    check_no_session("apply()", session.models.values())
    _ENTERED.add(session)
    try:
        yield
    finally:
        _ENTERED.discard(session)

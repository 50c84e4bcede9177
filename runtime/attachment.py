"""Attachment: attaches an engine to models and torch for the length of a block. It recognises which calls are steps.
A :class:`~.plan_source.StepObserver` gives its steps their policies.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial, wraps
from typing import Any, Literal

import torch

from poochplan.errors import UsageError
from poochplan.guard import Guard, guarded, guarded_around, stand
from poochplan.runtime.arena.library import fresh_memory
from poochplan.runtime.devices.cuda import refuse_capture, refuse_graphs
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.engine.cursor import NO_EVENTS, StepEvents
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import SavedHandle
from poochplan.runtime.messages import CallSite, warn
from poochplan.runtime.metering.watch import Watch
from poochplan.tensors.modes import (
    around_calls,
    around_compiled,
    around_optimizer_steps,
    uncompiled_hooks,
    unseen_by,
)
from poochplan.tensors.operators import past_first_calls
from poochplan.tensors.signatures import input_signature, tensor_leaves
from poochplan.tensors.storages import plain_storage
from poochplan.torch_private.compiler_internals import leave_alone
from poochplan.torch_private.hooks import Hooks, has_topmost_hooks, stand_aside, topmost_hooks
from poochplan.torch_private.tensor_internals import in_backward, intercept_autograd

from .compiled_hooks import hooks_for
from .open_sessions import ENTERED, check_no_session
from .plan_source import PlanSource, StepObserver

_ROOMS = "online", "profiler", "runtime", "tensors", "torch_private"
FAILED = (
    "the session stands aside, because something of ours has failed: {}; steps go on as without a session, the budget "
    "is not kept, and every result is right; please report this line"
)
INTERRUPTED = "an interrupt has closed the session; steps go on as without a session, and the budget is not kept"


class Attachment:
    """A context manager. States: *new*, *open* (inside the block), *away* (temporarily in-core), *aside* (in-core for
    good after a failure of ours, or while it *rests*: its source has no use for it), *closed*.

    After the block, handles that are still alive can be unpacked (backward outside the ``with``). The host tier is
    released with the last of them, and the C library's allocator keeps freed memory again
    (:mod:`poochplan.tensors.host_memory`).

    Parameters
    ----------
    models: by name, each with its own hooks; a single one has the name "".
    kind: of their device.
    open_device: called when the block is entered.
    source: of plans.
    observer: gives each segment its step policy, and sees what it does.
    events: called at the events of a step.
    is_guarded: whether an error of ours is to let the loop go on, by standing aside.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        kind: str,
        open_device: Callable[[], ComputeDevice],
        source: PlanSource,
        observer: StepObserver,
        events: StepEvents = NO_EVENTS,
        *,
        is_guarded: bool = False,
    ) -> None:
        self.models = models
        self.guard = Guard(self._failed) if is_guarded else None
        self.whole = together(models)
        self._kind = kind
        self._open_device = open_device
        self._source, self._observer = source, observer
        self._events = events
        self._parts = models if source.is_given and self.whole is not models.get("") else {}
        self.is_wanted: Callable[[], bool] = lambda: True
        """Called when a segment is about to begin. If it returns false, ``abandoned`` is called."""
        self.abandoned: Callable[[], None] = lambda: None
        """Leaves the block."""
        self.state: Literal["new", "open", "away", "aside", "closed"] = "new"
        self.call_site = CallSite.of_caller()
        self.leave: Callable[[], object] = self.__exit__
        """Ends the block if no caller has left it."""
        self._is_short = self._wakes = self._is_interrupted = False
        self.watch: Watch | None = None
        """Of the steps while this rests."""
        self._below: Hooks | None = None
        """Whose hooks autograd has while this rests."""
        self._thread: int | None = None
        self._stack, self._observing, self._short = ExitStack(), ExitStack(), ExitStack()
        self._held = ExitStack()
        """Resources that last until the last handle is gone: the device, and how its memory is released."""

    def __enter__(self) -> Attachment:
        self.call_site = CallSite.of_caller()
        past_first_calls()
        self._compiled = hooks_for(self.whole)  # it may load code to leave alone
        leave_alone("poochplan.guard", *(f"poochplan.{one}." for one in _ROOMS))
        stack = self._stack
        try:
            if self._kind == "cuda":
                refuse_graphs(self.whole)
            check_no_session("apply()", self.models.values())
            ENTERED.add(self)
            stack.callback(ENTERED.discard, self)
            stack.callback(self._let_go)
            if self.guard is not None:
                stack.callback(stand(self.guard))
            self._held.callback(self._short.close)
            if self._source.gives_up:
                self.memory_is_short()
            self.device = self._held.enter_context(closing(self._open_device()))
            self.engine = Engine(
                self._observer,
                self.device,
                self.whole,
                parts=self._parts,
                on_idle=self._idle,
                events=self._events,
            )
            stack.enter_context(self._compiled.compiled_deferring(self._kind))
            around_call = unseen_by(self.engine.recorder, self._observer.around_call)
            stack.enter_context(around_compiled(self.whole, around_call))
            for name, model in self.models.items():
                stack.enter_context(around_calls(model, partial(self._forward_begins, name)))
            stack.enter_context(around_optimizer_steps(self.whole, self._optimizer_steps, self._optimizer_stepped))
            self._source.attached(self)
            hooks = self._guarded(*self._observer.attached(self))
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                hooks = self._until_let_go(*hooks)
            self._hooks = uncompiled_hooks(*hooks, partial(self.engine.planned.before, guard=self.guard))
            self._held.callback(self.engine.planned.close)
            self._held.callback(self.engine.tape.clear)
            self.state, self._thread = "open", threading.get_ident()
            stack.enter_context(stand_aside(self._hooks))
            stack.callback(self._unhook)
            self._observe()
        except BaseException:
            stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.state != "new":
            self.state = "closed"
        self._stack.close()

    def _observe(self) -> None:
        """Steps are observed from here on."""
        for model in self.models.values():
            self._observing.enter_context(around_calls(model, ends=self._forward_ends))
        self._observing.enter_context(intercept_autograd(guarded_around(self._around_backward)))
        self.engine.planned.is_off = False
        self._hooks.__enter__()

    def _unhook(self) -> None:
        self._observing.close()
        self.engine.planned.is_off = True
        if threading.get_ident() == self._thread:  # on another thread they cannot be removed
            self.take_hooks_off()

    def is_forked(self) -> None:
        """This is a child process, in which no thread copies: steps run in-core."""
        self._unhook()
        self.state = "away"

    @property
    def is_left(self) -> bool:
        """Whether it was left open: the code that entered its block has ended."""
        return self.state in ("open", "away", "aside") and self.call_site.is_left

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    @property
    def has_begun(self) -> bool:
        """Whether it has an engine."""
        return "engine" in vars(self)

    @property
    def has_failed(self) -> bool:
        """Whether something of ours has raised, so that the session stands aside for good."""
        return self.guard is not None and self.guard.has_failed

    @property
    def thread(self) -> int | None:
        """The thread whose steps are observed, from the block's beginning to its end, except while it is away."""
        return self._thread if self.state in ("open", "aside") and not self.has_failed else None

    def memory_is_short(self) -> None:
        """Values leave the device from now on, so freed memory is returned to the system. Idempotent."""
        if self._kind == "cpu" and not self._is_short:
            self._is_short = True
            self._short.enter_context(fresh_memory())

    def take_hooks_off(self) -> None:
        """Removes the hooks, unless others lie on top of them. Then they do nothing, and go when they are on top."""
        if has_topmost_hooks(self._hooks):
            self._hooks.__exit__()

    def ends_here(self) -> bool:
        """Whether its purpose has ended although nothing left the block. If so, it is left now."""
        if self.state != "open" or self.is_wanted():
            return False
        self.abandoned()
        return True

    def settle(self) -> None:
        """Called between segments. Finishes the last segment's reports now, and not when the next one begins."""
        if not self.engine.cursor.is_open and self.engine.segment.number:
            self.engine.tell_end()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Steps inside run in-core, as if nothing were attached. Use it only on the level of the ``with`` block."""
        if self.state == "aside" or self.has_failed:
            yield
            return
        if self.state != "open":
            raise UsageError(
                f"away(): expected an open session, found a {self.state} one; call it inside the with block"
            )
        if self.engine.segment.used:
            self._events.over(self.engine.segment)
        self._events.resting()
        self.state = "away"
        with self.engine.recorder.away():
            self._hooks.__exit__()
            try:
                yield
            finally:
                if self.state == "away":  # or it has been ended meanwhile
                    self._hooks.__enter__()
                    self.state = "open"

    # -- standing aside ----------------------------------------------------------------------------------------

    @property
    def is_resting(self) -> bool:
        """Whether steps are plain until one takes too much."""
        return self.state == "aside" and not self.has_failed

    def rests(self) -> bool:
        """Called where a segment is about to begin: ends the last one. If nothing is to come for which steps need to be
        observed, they are plain from here on, and the answer is true: their saved tensors stay with autograd, and
        nothing records, plans or meters. Values that are still saved come back when they are asked for.
        """
        self.engine.end()
        self.settle()
        most = self._source.rests() if has_topmost_hooks(self._hooks) else None
        if most is None:
            return False
        self.state, self._wakes = "aside", False
        self._observer.stands_aside()
        self.engine.stand_aside()
        self._events.resting()
        self._unhook()
        self._below = topmost_hooks()
        self._short.close()
        self._is_short = False
        self._events.rests(most)
        self._begins_at_rest()
        return True

    def wakes_next(self) -> None:
        """The session rests until the next step."""
        self._wakes = True

    def begins_at_rest(self) -> bool:
        """A step is about to begin while the session rests. Returns whether it goes on to do so."""
        if not self._wakes or topmost_hooks() != self._below:  # above hooks of others, theirs would take ours off
            self._begins_at_rest()
            return True
        self.state, self.engine.is_aside = "open", False
        self._observe()
        return False

    def _begins_at_rest(self) -> None:
        if self.watch is not None and self.watch.begins():
            self._events.outgrown()

    def _failed(self, why: str) -> None:
        """Something of ours has raised, or was interrupted, perhaps amid a step. Whatever can be undone at any place is
        undone here. ``why`` is empty for an interrupt, of which is told only where the loop goes on.
        """
        self._is_interrupted = not why
        if self.state in ("open", "away"):
            self.state = "aside"
        if self.has_begun:
            for undo in (self.engine.stand_aside, self._observer.stands_aside, self._events.departed, self._unhook):
                with suppress(Exception):
                    undo()
        if why:
            with suppress(Exception):
                warn(FAILED.format(why))

    def _while_aside(self) -> None:
        """A model is called. What could not be removed amid a step is removed now."""
        if threading.get_ident() != self._thread or in_backward():
            return
        if not self.has_failed:
            if torch.is_grad_enabled() and not self.engine.cursor.is_announced:
                self.begins_at_rest()
            return
        self._unhook()
        if self._kind == "cuda" and torch.cuda.is_current_stream_capturing():  # leaving waits for copies
            return
        with suppress(Exception):
            self._modes_leave()
            self.leave()
            if self._is_interrupted:
                warn(INTERRUPTED)

    def _modes_leave(self) -> None:
        """No mode of ours is on the stack, not even a muted one (engine rule 11)."""
        for mode in tuple(self.guard.modes) if self.guard is not None else ():
            mode.leave_stack()

    def _guarded(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Hooks:
        """The hooks, which also defer unpacks of compiled code. Each falls back on a plain one."""
        rescued = self.engine.rescued
        own = guarded(unpack, rescued)  # compiled code may ask for it later
        plain_pack, plain_unpack = self._compiled.plainly((SavedHandle.untouched, rescued))
        pack, unpack = self._compiled.deferring((pack, own), self.engine.may_wait, self._kind)
        return guarded(pack, plain_pack), own if unpack is own else guarded(unpack, plain_unpack)

    # -- called by the engine and by torch --------------------------------------------------------------------

    def _is_ours(self) -> bool:
        return self.state == "open" and threading.get_ident() == self._thread

    def _is_at_rest(self) -> bool:
        return self.is_resting and threading.get_ident() == self._thread

    def _forward_begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.state == "aside":
            self._while_aside()
        if self.state in ("away", "aside", "closed"):
            return
        if not torch.is_grad_enabled():
            if self._is_ours() and not in_backward():
                if self.engine.segment.used and not self.engine.segment.is_held:  # a validation after the step
                    self._events.over(self.engine.segment)
                self._events.resting()
            return
        if in_backward():  # a user's checkpoint runs forward again, on CUDA on autograd's thread
            return
        if threading.get_ident() != self._thread:
            self._events.elsewhere(name)
            return
        if self.ends_here():
            return
        if self._kind == "cuda":
            refuse_capture()
        if self.engine.cursor.forward_begins_one():
            if self.rests():
                return
            self.engine.begin()
            given = [tensor for _, tensor in (*tensor_leaves("", args), *tensor_leaves("", kwargs))]
            self.engine.tape.is_given(given)
            storages = (plain_storage(tensor, self._kind) for tensor in given)
            self.engine.segment.given = [(weakref.ref(one), one.nbytes()) for one in storages if one is not None]
        self.engine.model_is_called(lambda: input_signature(args, kwargs), name)

    def _forward_ends(self, result: Any) -> None:
        if result is None and sys.exc_info()[0] is not None and self._is_ours() and not in_backward():  # it has raised
            self.engine.forward_raised()
            self._events.departed()

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self.has_failed and threading.get_ident() == self._thread and not in_backward():
                self._modes_leave()
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
            self._stepped(optimizer)
        elif self.watch is not None and self._is_at_rest():
            is_first, is_outgrown = not self.watch.has_stepped, self.watch.stepped()
            if is_outgrown:
                self._events.outgrown()
            if is_first or self._wakes:  # nobody else asks which optimizer has stepped last
                self.engine.cursor.optimizer_stepped()
                self._stepped(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._observer.stepped(optimizer)
        self._source.stepped(optimizer)

    def _idle(self) -> None:
        if self.state == "closed" or self.has_failed:
            self._held.close()

    def _until_let_go(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Hooks:
        """The hooks, which do not hold the models after the last handle is gone. A collective keeps the hooks of the
        thread that started it, and DDP's reducer keeps the collective (in ``Join``).
        """
        both = [pack, unpack]

        @wraps(pack)
        def packed(tensor: torch.Tensor) -> Any:
            return both[0](tensor) if both else tensor

        self._held.callback(both.clear)
        self._held.callback(vars(packed).clear)  # what it wraps
        return packed, lambda handle: both[1](handle) if both else handle

    def _let_go(self) -> None:
        if self.state == "new" or not self.engine.cursor.holds_values:  # otherwise with the last of them
            self._held.close()


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
            f"models: expected names that modules can have (no dots, not empty), found {sorted(map(str, models))}; "
            "rename them"
        ) from error

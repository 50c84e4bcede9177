"""How an optimizer steps in chunks, whose state visits the device one after the other (``docs/optimizer-state.md``).

An optimizer is never changed. Its own ``step`` is called once for each chunk, on a *shadow*: an object that shares all
with the optimizer but the groups, which hold the chunk's parameters alone. Torch itself makes the last call, between
the user's hooks. So hooks, schedulers and scalers see one step, and an error on the way leaves the groups as they were.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from poochplan.formats.plan import StateChunk
from poochplan.runtime.attachment import Attachment
from poochplan.runtime.messages import Messages
from poochplan.tensors.optimizers import is_away, is_separable, movable_state, parameters_of
from poochplan.torch_private.compiler_internals import hidden_from_compiler
from poochplan.torch_private.tensor_internals import tensors_in, unseen_by_modes
from poochplan.units import format_bytes

from .places import StatePlaces

TAKES_CLOSURE = (
    "{}.step() got a closure, which runs forward and backward amid the step: its state ({}) stays on the device, and "
    "steps may exceed the budget; run forward and backward before step()"
)
WAITS = (
    "the plan has optimizer state on the host, which leaves the device when its optimizer first steps; steps may "
    "exceed the budget until then; pass it, apply(plan, model, optimizer), and its state leaves before the first step"
)
Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]


class Part:
    """The parameters of an optimizer from number ``first`` to before ``behind``, which are stepped together."""

    def __init__(self, optimizer: torch.optim.Optimizer, first: int, behind: int, *, is_streamed: bool) -> None:
        self.optimizer, self.is_streamed = optimizer, is_streamed
        self.groups, at = list[dict[str, Any]](), 0
        for group in optimizer.param_groups:
            chosen = group["params"][max(0, first - at) : max(0, behind - at)]
            at += len(group["params"])
            if chosen:
                self.groups.append({**group, "params": chosen})

    def state(self) -> list[torch.Tensor]:
        """Its state that may leave the device, or has left it."""
        parameters = (one for group in self.groups for one in group["params"])
        return [state for one in parameters for state in movable_state(self.optimizer, one)]


def shadow_of(parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What steps these parts alone."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer), param_groups=[group for part in parts for group in part.groups])
    return shadow


class Visits:
    """One step's copies. State: by number of the streamed part, what is on its way in or on the device, and what is on
    its way out.
    """

    def __init__(self, places: StatePlaces, parts: Sequence[Part]) -> None:
        self._places, self._streamed = places, [part for part in parts if part.is_streamed]
        self._inside: dict[int, list[torch.Tensor]] = {}
        self._leaving: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        self._fetch(0)

    def enter(self, part: Part) -> None:
        """The part is stepped next. State of a kept one is away if its parameters were in a streamed one before."""
        if not part.is_streamed:
            self._places.come_back(filter(is_away, part.state()))
        else:
            number = self._streamed.index(part)
            self._places.settle(self._leaving.pop(number - 2, ()))
            self._fetch(number + 1)
            self._places.arrive(self._inside[number])

    def leave(self, part: Part) -> None:
        """It has been stepped."""
        if part.is_streamed:
            number = self._streamed.index(part)
            self._leaving[number] = state = part.state()
            self._places.send(state)
            self._inside.pop(number, None)

    def end(self) -> None:
        """All have left the device, also those that were not stepped. The thread waits for it."""
        for number, state in list(self._inside.items()):
            self._places.arrive(state)
            self.leave(self._streamed[number])
        for state in self._leaving.values():
            self._places.settle(state)
        self._leaving.clear()
        self._places.finish()

    def _fetch(self, number: int) -> None:
        if number < len(self._streamed):
            self._inside[number] = state = self._streamed[number].state()
            self._places.fetch(state)


@dataclass
class Made:
    """How far a step has come. ``is_theirs``: whether code of the user's or of torch's runs, whose errors pass.
    ``last``: the arguments of torch's own call, which is what is left to do; None for the given ones.
    """

    is_theirs: bool = False
    last: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class SteppedInChunks:
    """State: the optimizers that step in chunks, and the visits of the one that steps now. ``optimizers``: known ones;
    others are known once they have called a hook.

    It belongs to the session of ``attachment``, on whose thread it is used. If something of ours fails, the session
    stands aside: all state comes back, and steps are whole again.
    """

    def __init__(
        self, attachment: Attachment, optimizers: MutableSet[torch.optim.Optimizer], messages: Messages
    ) -> None:
        self._attachment, self._known, self._warn = attachment, optimizers, messages.warn
        self._places = StatePlaces(attachment.engine, messages.warn)
        self._chunks: dict[str, tuple[StateChunk, ...]] = {}
        """By name of the model."""
        self._of = weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[str, int]]()
        """The chunks of an optimizer: its model's name, and its number in the plan; -1 if it has none."""
        self._hooks = weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, ...]]()
        self._stays = weakref.WeakSet[torch.optim.Optimizer]()
        """Those whose state stays on the device, for a reason that was told."""
        self._returned = weakref.WeakSet[torch.optim.Optimizer]()
        """Those with state that has come back, or was loaded."""
        self._visits: Visits | None = None
        self._stepping = weakref.WeakSet[torch.optim.Optimizer]()
        """Those between their first hook and ours behind the step. It may get a closure, in which a step follows a new
        plan: such state leaves behind the step, because torch may step it whole.
        """
        self._late = weakref.WeakSet[torch.optim.Optimizer]()
        self._behind = weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]()
        """The hooks behind the steps of those that stepped before they were known to step in chunks."""

    # -- the plan -----------------------------------------------------------------------------------------------------

    def follow(self, name: str, chunks: Sequence[StateChunk]) -> None:
        """Streams these chunks of the model's optimizers from now on, if they hold more than those before. Their state
        leaves the device at once. Plans of other kinds of step, with less streamed, have more room than they need.
        """
        if _streamed_bytes(chunks) <= _streamed_bytes(self._chunks.get(name, ())):
            return
        self._chunks[name] = tuple(chunks)
        for optimizer in list(self._known):
            if self.meets(optimizer):
                if optimizer in self._stepping:
                    self._late.add(optimizer)
                else:
                    self._ours(self._leave, optimizer)
        if self.is_waiting:
            self._warn(WAITS)

    def step_begins(self) -> None:
        """What has come to the device outside planned steps leaves it."""
        while self._returned:
            self._ours(self._leave, self._returned.pop())

    @property
    def is_waiting(self) -> bool:
        """Whether an optimizer of which some state is streamed was not met yet, so that all of it may be there. If one
        has stepped that the plan does not know, nothing better is to come.
        """
        streamed = {(name, one.optimizer) for name, chunks in self._chunks.items() for one in chunks if one.streamed}
        return not streamed.issubset(self._of.values()) and all(number >= 0 for _, number in self._of.values())

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins. Called before the optimizer's own hooks."""
        if not self.meets(optimizer) and optimizer not in self._behind:
            self._behind[optimizer] = optimizer.register_step_post_hook(hidden_from_compiler(self._stepped))
        self._stepping.add(optimizer)

    def meets(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether it steps in chunks."""
        self._known.add(optimizer)
        if not self._chunks:
            return False
        if self._of.get(optimizer, ("", -1))[1] < 0:
            self._of[optimizer] = self._found(optimizer)
            if self._of[optimizer][1] < 0:
                return False
            before: Hook = hidden_from_compiler(self._steps)
            self._hooks[optimizer] = (
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(hidden_from_compiler(self._stepped)),
                optimizer.register_load_state_dict_post_hook(self._returned.add),
                optimizer.register_state_dict_post_hook(self._hands_out),
            )
        # Ours are next to the step: those of the user may change gradients before it, and state behind it.
        before_it, behind_it, *_ = self._hooks[optimizer]
        _hooks_of(optimizer, "pre").move_to_end(before_it.id)
        _hooks_of(optimizer, "post").move_to_end(behind_it.id, last=False)
        return True

    def close(self) -> None:
        """The session ends: optimizers step as before, with all their state."""
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        for handle in self._behind.values():
            handle.remove()
        self._behind.clear()
        self._hooks.clear()
        self._chunks.clear()
        self._places.close()

    def _found(self, optimizer: torch.optim.Optimizer) -> tuple[str, int]:
        """Which of the plan's optimizers it is: the first with as many parameters that no other one is."""
        own = parameters_of(optimizer)
        for name, chunks in self._chunks.items():
            if set(own).isdisjoint(self._attachment.models[name].parameters()):
                continue
            taken = {number for model, number in self._of.values() if model == name}
            for number in sorted({one.optimizer for one in chunks} - taken):
                if sum(one.count for one in chunks if one.optimizer == number) == len(own):
                    return name, number
        return "", -1

    def _parts_of(self, optimizer: torch.optim.Optimizer) -> list[Part]:
        """What its step consists of. Parameters that came after the plan are stepped last, and their state is kept."""
        name, number = self._of[optimizer]
        own = [one for one in self._chunks[name] if one.optimizer == number]
        end, count = max(one.first + one.count for one in own), len(parameters_of(optimizer))
        parts = [Part(optimizer, one.first, one.first + one.count, is_streamed=one.streamed) for one in own]
        return [part for part in (*parts, Part(optimizer, end, count, is_streamed=False)) if part.groups]

    # -- a step of an optimizer ---------------------------------------------------------------------------------------

    def _steps(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's hook before a step, so that it only tries. Returns what torch is to call last."""
        if torch.compiler.is_compiling():
            return None
        made = Made()
        try:
            self._in_chunks(optimizer, args, kwargs, made)
        except BaseException as error:
            if not self._goes_on(optimizer, error, made):
                raise
        return made.last

    def _in_chunks(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made
    ) -> None:
        parts = self._parts_of(optimizer) if self._is_here(optimizer) else []
        if not any(part.is_streamed for part in parts):
            self._come_back(optimizer)
            return
        closure, rest = kwargs.get("closure", args[1] if len(args) > 1 else None), args[1:]
        if not is_separable(optimizer):
            if closure is not None:
                self._stay(optimizer)
            else:  # it is one part, even if the plan, which was made with another optimizer, has several
                parts = [Part(optimizer, 0, _ALL, is_streamed=True)]
                self._enters(self._begin(parts), parts[0])
            return
        if closure is not None:  # which every optimizer that is separable calls first, and so
            made.is_theirs = True
            with torch.enable_grad():
                loss = closure()
            made.is_theirs = False
            parts = self._parts_of(optimizer)  # a step in it may follow another plan
            rest, kwargs = (), {**kwargs, "closure": lambda: loss}
            made.last = (optimizer,), kwargs
        self._until_last(optimizer, parts, rest, kwargs, made)

    def _until_last(
        self,
        optimizer: torch.optim.Optimizer,
        parts: list[Part],
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Made,
    ) -> None:
        step: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        visits = self._begin(parts)
        for number, part in enumerate(parts):
            self._enters(visits, part)
            shadow = shadow_of([part], optimizer)
            if number + 1 == len(parts):
                made.last = (shadow, *rest), kwargs
                break
            left = shadow_of(parts[number + 1 :], optimizer)
            made.is_theirs = True
            step(shadow, *rest, **kwargs)
            made.is_theirs, made.last = False, ((left, *rest), kwargs)
            with _quietly():
                visits.leave(part)

    def _goes_on(self, optimizer: torch.optim.Optimizer, error: BaseException, made: Made) -> bool:
        """Whether what is left is stepped at once, because something of ours has failed."""
        guard = self._attachment.guard
        if made.is_theirs or guard is None or not guard.takes(error):
            self._ours(self._end)
            return False
        self._come_back(optimizer)
        return True

    def _stepped(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Torch's hook behind a step, so that it only tries."""
        if torch.compiler.is_compiling():
            return
        self._stepping.discard(optimizer)
        if self._visits is None and not self._late:  # as in every step of a plan that streams nothing
            return
        try:
            with _quietly():
                self._end()
                if optimizer in self._late:
                    self._late.discard(optimizer)
                    self._leave(optimizer)
        except BaseException as error:
            guard = self._attachment.guard
            if guard is None or not guard.takes(error):
                raise
            self._come_back(optimizer)

    def _hands_out(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any] | None:
        """Torch's hook behind ``state_dict``, which has copies of a GPU's state that is away: to the user such a tensor
        is the GPU's, of which ``.cpu()`` would be a copy.
        """
        if self._attachment.device.where.type == "cpu":
            return None
        state = {key: _copied(entries) for key, entries in found["state"].items()}
        return {**found, "state": state}

    def _is_here(self, optimizer: torch.optim.Optimizer) -> bool:
        is_on = self._attachment.thread == threading.get_ident() and not self._places.is_copied
        return is_on and optimizer not in self._stays

    def _begin(self, parts: list[Part]) -> Visits:
        with _quietly():
            self._end()  # a step that raised
            visits = self._visits = Visits(self._places, parts)
            visits.begin()
        return visits

    def _enters(self, visits: Visits, part: Part) -> None:
        with _quietly():
            visits.enter(part)

    def _end(self) -> None:
        """Nothing of a step is left on the device."""
        visits, self._visits = self._visits, None
        if visits is not None:
            visits.end()

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Its streamed state leaves the device."""
        for part in self._parts_of(optimizer) if self._is_here(optimizer) else []:
            if part.is_streamed:
                state = part.state()
                self._places.send(state)
                self._places.settle(state)
        self._places.finish()

    def _stay(self, optimizer: torch.optim.Optimizer) -> None:
        self._stays.add(optimizer)
        self._come_back(optimizer)
        size_bytes = sum(one.nbytes for one in Part(optimizer, 0, _ALL, is_streamed=True).state())
        self._warn(TAKES_CLOSURE.format(type(optimizer).__name__, format_bytes(size_bytes)))

    def _come_back(self, optimizer: torch.optim.Optimizer) -> None:
        self._visits = None
        self._returned.add(optimizer)
        state = tensors_in(list(optimizer.state.values()))
        self._ours(self._places.come_back, state)

    def _ours(self, call: Callable[..., object], *args: Any) -> bool:
        """Calls something of ours. Returns whether it did not fail; what is no error of ours is raised."""
        try:
            with _quietly():
                call(*args)
        except BaseException as error:
            guard = self._attachment.guard
            if guard is None or not guard.takes(error):
                raise
            return False
        return True


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with unseen_by_modes(), torch.no_grad():
        yield


_ALL = 1 << 62
"""More parameters than any optimizer has."""


def _copied(entries: Any) -> Any:
    if not isinstance(entries, dict):
        return entries
    tensors = ((name, one) for name, one in entries.items() if isinstance(one, torch.Tensor) and is_away(one))
    return {**entries, **{name: one.clone() for name, one in tensors}}


def _hooks_of(optimizer: torch.optim.Optimizer, when: str) -> OrderedDict[int, Any]:
    found: OrderedDict[int, Any] = getattr(optimizer, f"_optimizer_step_{when}_hooks")
    return found


def _streamed_bytes(chunks: Iterable[StateChunk]) -> int:
    return sum(one.size_bytes for one in chunks if one.streamed)

"""The recorder: writes the ops of planned stretches of forward onto a tape. Switched on and off at planned points."""

from __future__ import annotations

from typing import Any

import torch

from poochplan.tensors.arguments import flatten, outputs_of
from poochplan.tensors.modes import ToggledMode, is_dispatched_plainly
from poochplan.tensors.operators import Traits, is_chosen_by_timing, traits
from poochplan.tensors.storages import Geometry, is_host_scalar, is_plain, plain_storage, version_probe
from poochplan.tensors.writes import Writes, writes_of
from poochplan.torch_private.tensor_internals import called_below_autograd, version_of

from .recorded import OFF, CounterBefore, RecordedOp, Scratch, View, state_of
from .tape import Tape


class Recorder(ToggledMode):
    """A dispatch mode. State: whether it is on, and whether the op in which that was asked for may still run.

    A save point lies within an op. What its kernel calls from there on is not recorded: in there views have version
    counters of their own, which look as if the storage was another.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self._device_type = tape.device_type
        self._within_op = False

    @property
    def window(self) -> int:
        """The window of recording that is open, or ``OFF``."""
        return self.tape.window if self.is_on else OFF

    def switch_on(self) -> None:
        """Begins a new window of recording, unless one is open."""
        if not self.is_on:
            self.tape.window += 1
            self._within_op = is_dispatched_plainly()  # otherwise a mode is handed that op whole
        super().switch_on()

    def switch_off(self) -> None:
        """Ends the window: what is written from here on is not recorded."""
        super().switch_off()
        self.tape.settle()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = traits(func)
        if facts.pure_view or not self.is_on:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if self._within_op and self._is_of_that_op(facts, args, kwargs):
            self._pass_over(facts, args, kwargs)
            return func(*args, **kwargs)
        op, written = self._before(func, facts, args, kwargs)
        outputs = func(*args, **kwargs)
        self._after(op, written, outputs)
        return outputs

    def _is_of_that_op(self, facts: Traits, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the call is of the op in which recording was switched on; the first that is not ends the question.

        What makes a tensor of none looks alike in both, and is recorded.
        """
        if facts.makes_alike or not any(isinstance(leaf, torch.Tensor) for leaf in flatten(args, kwargs)[0]):
            return False
        self._within_op = called_below_autograd()
        return self._within_op

    def _pass_over(self, facts: Traits, args: Any, kwargs: dict[str, Any]) -> None:
        """What this call writes nobody will have recorded."""
        for tensor in self._writes(facts, args, kwargs).in_place:
            record = self.tape.known(tensor) if is_plain(tensor, self._device_type) else None
            if record is not None:
                record.was_written_unseen()

    def _before(
        self, func: Any, facts: Traits, args: Any, kwargs: dict[str, Any]
    ) -> tuple[RecordedOp, list[CounterBefore]]:
        flat, spec = flatten(args, kwargs)
        usable = facts.trusted and not is_chosen_by_timing(facts, self._device_type)
        arguments: list[Any] = []
        reads: list[View] = []
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                leaf = self._reference(leaf)
                if type(leaf) is View:
                    reads.append(leaf)
                elif leaf is _UNUSABLE:
                    usable = False
            arguments.append(leaf)
        op = self.tape.next_op(func, tuple(arguments), tuple(reads), spec, usable=usable)
        op.uninitialised = facts.uninitialised
        if facts.random:
            op.generator = _generator_of(flat, self._device_type)
            op.state = state_of(op.generator)
        return op, self._written(op, facts, args, kwargs) if facts.may_write else _NONE

    def _written(self, op: RecordedOp, facts: Traits, args: Any, kwargs: dict[str, Any]) -> list[CounterBefore]:
        """What the op writes in place; completes what is known of it."""
        writes = self._writes(facts, args, kwargs)
        if writes.scratch:
            arguments = list(op.arguments)
            for position, tensor in writes.scratch.items():
                arguments[position] = Scratch(tuple(tensor.shape), tensor.dtype, tensor.device)
            op.arguments = tuple(arguments)
            op.reads = tuple(argument for argument in arguments if type(argument) is View)
        op.usable = op.usable and writes.repeatable
        if writes.overwritten is not None:
            op.overwrites = self.tape.record_of(writes.overwritten)
        plain = (tensor for tensor in writes.in_place if is_plain(tensor, self._device_type))
        return [CounterBefore.of(self.tape.record_of(tensor), tensor) for tensor in plain]

    def _writes(self, facts: Traits, args: Any, kwargs: dict[str, Any]) -> Writes:
        return writes_of(facts, args, kwargs, static=self.tape.static, device_type=self._device_type)

    def _reference(self, leaf: torch.Tensor) -> Any:
        storage = plain_storage(leaf, self._device_type)
        if storage is None:
            # A number in host memory is taken now; it may be another when a replay reads it.
            return leaf.detach().clone() if is_host_scalar(leaf, self._device_type) else _UNUSABLE
        record = self.tape.met(leaf, storage, self.tape.window)
        watch = None if record.is_known else (version_probe(leaf), version_of(leaf))
        return View(record, len(record.writes), Geometry.of(leaf), watch)

    def _after(self, op: RecordedOp, written: list[CounterBefore], outputs: Any) -> None:
        if op.uninitialised and isinstance(outputs, torch.Tensor) and not written:
            op.allocate_only(outputs)
        if written:
            self.tape.were_written(op, written)
        if isinstance(outputs, torch.Tensor):
            self._born(op, 0, outputs)
            return
        for position, output in enumerate(outputs_of(outputs)):
            if isinstance(output, torch.Tensor):
                self._born(op, position, output)

    def _born(self, op: RecordedOp, position: int, output: torch.Tensor) -> None:
        storage = plain_storage(output, self._device_type)
        if storage is not None:
            self.tape.was_born(op, position, output, storage)


_NONE: list[CounterBefore] = []
_UNUSABLE = object()
"""Stands for a tensor argument that a replay cannot reproduce: a subclass, another device, a sparse layout."""


def _generator_of(flat: list[Any], device_type: str) -> torch.Generator:
    for leaf in flat:
        if isinstance(leaf, torch.Generator):
            return leaf
    if device_type != "cuda":
        return torch.default_generator
    places = [leaf if isinstance(leaf, torch.device) else getattr(leaf, "device", None) for leaf in flat]
    indices = [place.index for place in places if place is not None and place.type == "cuda"]
    known = next((index for index in indices if index is not None), None)
    return torch.cuda.default_generators[torch.cuda.current_device() if known is None else known]

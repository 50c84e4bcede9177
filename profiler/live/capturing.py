"""Capturing: the segment in which ops and values are noted. Everything swaps meanwhile, so that it cannot run out."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, Kind, Phase
from poochplan.profiler.capture.capture import Capture, collected_after
from poochplan.profiler.capture.captured import CapturedValue
from poochplan.profiler.capture.node_hooks import Gradients
from poochplan.profiler.capture.node_ops import NodeOps
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.profiler.trials.host_store import bytes_of
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import Handle, SavedValue
from poochplan.runtime.step_policies.step_policy import SwapEach
from poochplan.runtime.watch.census import census
from poochplan.tensors.modes import before_forward
from poochplan.tensors.signatures import input_signature
from poochplan.tensors.storages import has_storage, parts_of, static_keys

from .watch import Pack, Scene, Unpack, Watch

NAMED = 100
"""So many of the largest tensors that live beside the step are values of their own; the rest is one."""


class EngineCapture(Capture):
    """A capture of what the runtime's engine moves, of a backward whose gradients are used.

    State: the value that each of the engine's stands for.
    """

    def __init__(self, model: torch.nn.Module, where: torch.device) -> None:
        super().__init__(where, LayerTracker(), static_keys(model, where.type))
        self._model = model
        self.nodes = NodeOps(self, self._workspace, self._clock, self._gradients)
        self.checkpointed = self.tracker.ran_again
        self._numbers: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[SavedValue]] = {}

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        """What ``run()`` gives, a backward from the outputs that is looked at node by node."""
        with self.away():
            return self.nodes.observed(outputs, run)

    def switch_off(self) -> None:
        super().switch_off()
        self.nodes.leave()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block in which values are moved: nothing in it is the step's."""
        with self.nodes.set_aside(), self.compiled_calls.set_aside(), self.paused():
            yield

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """What is to be called in the place of a compiled callable."""
        if not self.nodes.is_inside:
            return self.compiled_calls.around(path, call)
        self.look_for_checkpoint(path)
        return call

    def gradients_arrive(self, gradients: Gradients) -> None:
        self.nodes.gradients_arrive(gradients)

    def gone(self, value: CapturedValue) -> None:
        super().gone(value)
        self.nodes.freed(value.size_bytes)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]

    def packed(self, tensor: torch.Tensor, handle: Handle) -> None:
        """The engine has given that handle for a tensor."""
        value = handle.value
        if value is None:
            self.kept_as_it_is(tensor)
            return
        number, _, _ = self.saved(tensor)
        key = id(value)
        if key not in self._ends:
            self._numbers[key] = number
            self._ends[key] = weakref.ref(value, lambda _: self._ended(key))
            self.lifetimes.holds(number)

    def is_back(self, value: SavedValue, storage: torch.UntypedStorage) -> None:
        """Backward is about to read the value there."""
        number = self._numbers.get(id(value))
        if number is not None:
            self.nodes.reads(number)
            if not self.lifetimes.is_known(storage):
                self.lifetimes.is_copied_to(storage, number)

    def _ended(self, key: int) -> None:
        del self._ends[key]
        self.lifetimes.let_go(self._numbers.pop(key))


class Capturing(Watch):
    """``capture`` has what the segment did, ``kinds`` what its values are, ``beside_bytes`` what else was there."""

    def __init__(self, scene: Scene, capture: Capture | None = None) -> None:
        """``capture``: one that has hooks of its own; by default it is of what the engine moves."""
        super().__init__(scene, SwapEach(at_once=True))
        self.swaps_once = True
        self.capture = capture or EngineCapture(scene.model, scene.where)
        self.nodes = self.capture.nodes if isinstance(self.capture, EngineCapture) else None
        self.kinds = Kinds(self.capture)
        self.beside_bytes = 0
        self.has_gradients = False
        self._number = 0

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        self._number = segment.number
        self.capture.inputs = segment.inputs
        self.has_gradients = any(one.grad is not None for one in self.scene.model.parameters())
        gc.collect()  # what waits for it is not there for the step
        self._look_around(segment)
        with (
            collected_after(self.capture, self.kinds if self.scene.there_before is None else ()),
            before_forward(self.scene.model, self._called) if self.scene.there_before else contextlib.nullcontext(),
            self.capture.running(self.scene.model),
        ):
            yield

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.capture.inputs is None:
            self.capture.inputs = input_signature(args, kwargs)

    def _look_around(self, segment: Segment) -> None:
        """What is there before the segment: what the model and optimizers hold, and what lives beside the step."""
        model, kinds = self.scene.model, self.kinds
        kinds.note_model(model)
        for optimizer in self.scene.optimizers:
            kinds.note_optimizer(optimizer)
        if self.has_gradients:
            kinds.note_gradients(model)
        if self.scene.there_before is not None:
            kinds.note(self.scene.there_before(), Kind.INPUT)  # last: what is also the model's is the model's
            return
        storages = [bytes_of(storage) for storage in census(self.scene.where.type, 1).values()]
        others = sorted((one for one in storages if self.capture.value_if_known(one) < 0), key=lambda one: -one.nbytes)
        kinds.note(others[:NAMED], Kind.INPUT)
        rest = (-(-one.nbytes // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES for one in others[NAMED:])
        self.beside_bytes = segment.left_over_bytes + sum(rest)
        self.look_around()

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.capture.phase = phase
        if phase is Phase.OPTIMIZER:
            self.kinds.note_gradients(self.scene.model)

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self.capture.around_call(path, call)

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        return self._engines.observed(outputs, run) if self.scene.there_before is None else run()

    def runs_another(self) -> None:
        if self.scene.there_before is None:
            self._engines.nodes.runs_another()

    @property
    def _engines(self) -> EngineCapture:
        assert isinstance(self.capture, EngineCapture), "a capture with hooks of its own is asked for no other"
        return self.capture

    def pack(self, tensor: torch.Tensor, pack: Pack) -> Handle:
        with self._engines.set_aside():
            handle = pack(tensor)
        self.packed(tensor, handle)
        return handle

    def packed(self, tensor: torch.Tensor, handle: Handle) -> None:
        if self.phase is not Phase.FORWARD and handle.value is not None:
            self.why_not, self.is_final = SAVES_AFTER_USE, True
        self._engines.packed(tensor, handle)

    def unpack(self, handle: Handle, unpack: Unpack) -> torch.Tensor:
        value = handle.value
        if value is None or handle.segment != self._number:
            return unpack(handle)
        if not handle.used:
            self.capture.used(handle.ordinal)
        with self._engines.set_aside():
            tensor = unpack(handle)
        self._engines.is_back(value, tensor.untyped_storage())
        return tensor


SAVES_AFTER_USE = "it saves more after its backward has begun"


class Kinds(dict[int, Kind]):
    """Kind by value, for those that somebody has told; the first to tell counts."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def note(self, tensors: Iterable[Any], kind: Kind) -> None:
        """The tensors among these, and those that sparse and nested ones are made of, are of that kind."""
        for tensor in tensors:
            for part in parts_of(tensor) if isinstance(tensor, torch.Tensor) else ():
                if has_storage(part, self._capture.device_type):
                    self.setdefault(self._capture.value_of(part), kind)

    def note_model(self, model: torch.nn.Module) -> None:
        """Parameters and buffers."""
        self.note(model.parameters(), Kind.PARAMETER)
        self.note(model.buffers(), Kind.BUFFER)

    def note_gradients(self, model: torch.nn.Module) -> None:
        """Those that are there."""
        self.note((parameter.grad for parameter in model.parameters()), Kind.GRADIENT)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its state."""
        self.note(_tensors_in(list(optimizer.state.values())), Kind.OPTIMIZER_STATE)


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested containers, as optimizers keep them (LBFGS in lists)."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors_in(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors_in(item)

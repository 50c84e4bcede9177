"""Capture: one real step with every op and value, and when each value would die if autograd did not hold it.

The runtime's engine moves every saved value out of its storage at once. So the death of the original shows when forward
itself releases it (forward death), and the death of its handles shows when autograd does.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch

from poochplan.formats import profile as formats
from poochplan.formats.occupancy import Floats
from poochplan.formats.profile import Phase, PointKind
from poochplan.formats.profile_parts import rounded_up
from poochplan.profiler.capture.node_ops import Stretches
from poochplan.profiler.capture.workspace import Workspace, workspace_of
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.runtime.compiled_hooks import hooks_for
from poochplan.runtime.engine.saved_value import SavedHandle, SavedValue
from poochplan.runtime.metering.allocated import aside
from poochplan.runtime.metering.census import LEAST_BYTES
from poochplan.tensors.modes import ToggledMode
from poochplan.tensors.operators import traits, writes_of
from poochplan.tensors.storages import (
    bytes_of,
    has_storage,
    is_host_scalar,
    is_made_of_parts,
    is_plain,
    parts_of,
    static_keys,
    storage_key,
)
from poochplan.torch_private.sharding import local_tensor, told_of_resizes
from poochplan.torch_private.tensor_internals import (
    backward_node_number,
    in_backward,
    is_dense,
    pytree,
    tensors_in,
    version_of,
)

from .captured import CapturedOp, CapturedValue, Lifetimes, shapes_of
from .clock import clock_of
from .compiled_calls import CompiledCalls
from .node_ops import NodeOps


class Capture(ToggledMode):
    """Dispatch mode of the capturing step. The engine reports its packs and unpacks to it. State: ticks so far, values
    by storage, live handles, and the profile's value for each of the engine's values.
    """

    sees_values = True
    unmeasured_ops = 0
    """Number of distinct ops whose memory inside is unknown, if that of others is known."""

    def __init__(self, model: torch.nn.Module, where: torch.device, workspace: Workspace | None = None) -> None:
        """``workspace``: instead of the device's own."""
        super().__init__()
        self.model, self.device_type = model, where.type
        self.tracker = LayerTracker()
        self.phase = Phase.FORWARD
        self.ops: list[CapturedOp] = []
        self.lifetimes = Lifetimes(lambda: len(self.ops) + len(self.points) - 1, self.gone)
        self.values = self.lifetimes.values
        self.handles: list[formats.Handle] = []
        self.points: list[formats.Point] = []
        self.kept: list[tuple[str, str, dict[int, int]]] = []
        """Saved tensors that are sparse, nested or wrap others: (kind, layer, bytes by storage)."""
        self.inputs: tuple[str, ...] | None = None
        """Inputs of the model's first call; None before it."""
        self.is_called = True
        """Whether the model has been called. A session records nothing before that, or before the first save."""
        self.garbage: set[int] = set()
        """Values that only the garbage collector has freed; see :func:`collected_after`."""
        self.left_over: set[int] | None = None
        """Values of the step that were still held when the next one began; None while that is unknown."""
        self.inherited_bytes = 0
        """Bytes that the step before has left, if this one was captured with them."""
        self._static = static_keys(model, where.type)
        self._paused = False
        self.saved_values: set[int] = set()
        self.clock = clock_of(where)
        self.workspace = workspace or workspace_of(where)
        self._marks: list[tuple[CapturedOp, Stretches]] = []
        self.compiled_calls = CompiledCalls(self)
        self.nodes = NodeOps(self)
        self._numbers: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[SavedValue]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Captures for the length of a block. Other code reports saves, uses and compiled callables."""
        points = hooks_for(self.model).told_of_points(self.compiled_calls.point, self.device_type)
        with self.tracker.on(self.model), points, self.workspace.running(), told_of_resizes(self.resized):
            self.switch_on()
            try:
                yield
            finally:
                self.switch_off()
                self.clock.synchronize()
                for op, stretches in self._marks:
                    op.duration_s = sum(self.clock.seconds(begin, end) for begin, end in stretches)
                self._marks.clear()

    def switch_off(self) -> None:
        super().switch_off()
        self.nodes.leave()

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        """The result of ``run()``, a backward from the outputs, observed by nodes because its gradients are used."""
        with self.away():
            return self.nodes.observed(outputs, run)

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self.nodes.is_inside:
            return self.compiled_calls.around(path, call)
        self.look_for_checkpoint(path)
        return call

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block in which values are moved: nothing in it belongs to the step."""
        with self.nodes.set_aside(), self.compiled_calls.set_aside(), self.paused():
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose ops and allocations do not belong to the step."""
        with self.unseen(), aside():
            yield

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """A block whose ops belong to compiled code and are not recorded separately."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def durations(self) -> Floats:
        """Seconds of each op of this step, as a run of (1, ops)."""
        return np.array([[op.duration_s for op in self.ops]])

    def value_of(self, tensor: torch.Tensor) -> int:
        """The value of the tensor's storage. A value that is seen for the first time existed before the step."""
        known = self.lifetimes.find(tensor)
        return known if known >= 0 else self._new_value(tensor, "", born=-1)

    def inherit(self, earlier: Capture) -> None:
        """Values of an earlier step that something still holds are there before this one."""
        before = len(self.values)
        for storage in self.lifetimes.inherit(earlier.lifetimes):
            self.workspace.knows(storage)
        self.inherited_bytes = sum(value.size_bytes for value in self.values[before:])

    def begins_with(self, value: SavedValue) -> None:
        """A value that the segment before has saved is there before this one, until its last handle is gone."""
        storage = value.storage
        if storage is not None:
            self.workspace.knows(storage)
        self._follows(value, self.lifetimes.outlives(value.size_bytes, storage))

    # -- ops --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = self.tracker.current() if not self._paused else ""
        facts = traits(func)
        if self._paused or facts.pure_view:
            return self.run_op(func, args, kwargs)
        self.look_for_checkpoint()
        op = CapturedOp(facts.name, layer, self.phase)
        leaves = tensors_in((args, kwargs))
        plain = self.ordinary(leaves)
        op.inputs = list(dict.fromkeys(self.value_of(leaf) for leaf in plain))
        op.random = facts.random
        writes = writes_of(facts, args, kwargs, self._static, self.device_type)
        op.early = not self.is_called and not self.handles
        op.opaque = (
            op.early
            or not writes.repeatable
            or not all(is_plain(one, self.device_type) or is_host_scalar(one, self.device_type) for one in leaves)
        )
        op.uninitialised = facts.uninitialised
        if facts.uninitialised:
            op.inputs = []  # they only give it a shape, which a replay knows
        if writes.overwritten is not None:
            op.overwrites = self.value_of(writes.overwritten)
        op.writes = self.written(writes.in_place)
        if self.phase is Phase.BACKWARD:
            op.node = backward_node_number()
            op.adds_to = self._added_to(op, plain)
        outputs = self._run(op, func, args, kwargs)
        op.shapes = shapes_of(outputs)
        self._born(op, outputs, facts.partly_unwritten)
        self.ops.append(op)
        return outputs

    def _added_to(self, op: CapturedOp, plain: list[torch.Tensor]) -> int:
        """The first summand, if the op may be autograd's sum of the gradients that two nodes give one tensor."""
        if op.name != "aten.add.Tensor" or len(op.inputs) != 2 or op.node < 0 or torch.is_grad_enabled():
            return -1
        born = self.values[op.inputs[0]].born
        is_older = born >= 0 and self.ops[born].phase is Phase.BACKWARD and self.ops[born].node != op.node
        is_alike = len(plain) == 2 and plain[0].stride() == plain[1].stride()
        return op.inputs[0] if is_older and is_alike and is_dense(plain[0]) else -1

    def look_for_checkpoint(self, compiled: str | None = None) -> None:
        """Detects a checkpoint: autograd is off in backward, so if it is on, a forward runs again."""
        if self.phase is Phase.BACKWARD and in_backward() and torch.is_grad_enabled():
            self.tracker.ran_again[self.tracker.running_again(compiled)] = None

    def ordinary(self, leaves: list[Any]) -> list[torch.Tensor]:
        """Those of the tensors that have storages, and the tensors that sparse and nested ones consist of."""
        if not any(isinstance(leaf, torch.Tensor) and is_made_of_parts(leaf) for leaf in leaves):
            return [x for x in leaves if isinstance(x, torch.Tensor) and has_storage(x, self.device_type)]
        with self.paused():
            parts = [part for leaf in leaves if isinstance(leaf, torch.Tensor) for part in parts_of(leaf)]
            return [part for part in parts if has_storage(part, self.device_type)]

    def _run(self, op: CapturedOp, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the op and returns its result; records its time and memory."""
        self.workspace.begin()
        begin = self.clock.begin()
        outputs = self.run_op(func, args, kwargs)
        self.took(op, [(begin, self.clock.end())])
        self.workspace.end(op)
        return outputs

    def written(self, tensors: list[torch.Tensor]) -> list[int]:
        """The values that are written in place; saved ones among them are pinned."""
        values = list(dict.fromkeys(map(self.value_of, self.ordinary(tensors))))
        for value in values:
            if value in self.saved_values and self.phase is Phase.FORWARD:
                self.values[value].pinned_because = "written in place after it was saved"
        return values

    def bear(self, op: CapturedOp, leaves: list[Any], born: int) -> None:
        """New storages among the leaves are outputs of the op with number ``born``."""
        for part in self.ordinary(leaves):
            if self.lifetimes.find(part) < 0:
                self.workspace.holds(op, len(op.outputs), part.untyped_storage())
                op.outputs.append(self._new_value(part, op.layer, born))

    def arise(self, tensor: torch.Tensor, behind: int = -1) -> None:
        """New storages, no op's output, appeared after that op (by default the last one), as sums of gradients do."""
        for part in self.ordinary([tensor]):
            if self.lifetimes.find(part) < 0:
                self._new_value(part, self.ops[behind].layer, range(len(self.ops))[behind])

    def _born(self, op: CapturedOp, outputs: Any, partly_unwritten: frozenset[int]) -> None:
        leaves = pytree.tree_leaves(outputs)
        self.bear(op, leaves, len(self.ops))
        if partly_unwritten:
            parts = self.ordinary([leaves[position] for position in partly_unwritten])
            op.partly_unwritten = [self.value_of(part) for part in parts]

    def _new_value(self, tensor: torch.Tensor, layer: str, born: int) -> int:
        self.workspace.knows(tensor.untyped_storage())
        return self.lifetimes.add(tensor, layer, born)

    def resized(self, storage: torch.UntypedStorage, before_bytes: int) -> None:
        """A storage gives up its memory or takes it again, as those of FSDP's gathered weights do."""
        if storage.device.type != self.device_type:
            return
        if before_bytes and not storage.nbytes():
            self.lifetimes.gives_up(storage)
            self.nodes.runs_another()
        elif storage.nbytes() and not before_bytes:
            self.workspace.knows(storage)
            with self.paused():
                whole = bytes_of(storage)
            self.lifetimes.takes_again(whole, self.tracker.current(), len(self.ops) - 1)

    def gone(self, value: CapturedValue) -> None:
        """Reports a dead value to the running compiled code, or to the node."""
        self.compiled_calls.freed(value.size_bytes, rounded_up(value.size_bytes), value.born)
        self.nodes.freed(value.size_bytes)

    def took_inside(self, op: CapturedOp, taken_bytes: int | None, freed_bytes: int = 0) -> None:
        """Code that no mode looked into has taken so much, its outputs included, and freed so much of values."""
        if taken_bytes is not None:
            born_bytes = sum(rounded_up(self.values[number].size_bytes) for number in op.outputs)
            op.workspace_bytes = max(0, taken_bytes - born_bytes + freed_bytes)

    @contextlib.contextmanager
    def timed(self, op: CapturedOp) -> Iterator[None]:
        begin = self.clock.begin()
        try:
            yield
        finally:
            self.took(op, [(begin, self.clock.end())])

    def took(self, op: CapturedOp, stretches: Stretches) -> None:
        self._marks.append((op, stretches))

    # -- points -----------------------------------------------------------------------------------------------

    def packed(self, tensor: torch.Tensor, handle: SavedHandle) -> None:
        value = handle.value
        if value is None:
            self.kept_as_it_is(tensor)
            return
        number = self.saved(local_tensor(tensor))
        if id(value) not in self._ends:
            self._follows(value, number)

    def _follows(self, value: SavedValue, number: int) -> None:
        key = id(value)
        self.lifetimes.holds(number)
        self._numbers[key] = number
        self._ends[key] = weakref.ref(value, lambda _: self._ended(key))

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

    def saved(self, tensor: torch.Tensor) -> int:
        """Records a pack of a tensor that may be moved, and returns the number of its value."""
        number = self._packed_value(tensor)
        value = self.values[number]
        ordinal, dtype, shape = len(self.handles), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if number not in self.saved_values:
            self.saved_values.add(number)
            value.packed_version = version_of(tensor)
            # The runtime needs the tensor as it was packed, not as it was created.
            value.dtype, value.shape = dtype, shape
            self.passes(PointKind.SAVE, ordinal)
        elif version_of(tensor) != value.packed_version:
            value.pinned_because = "written in place after it was saved"
        self.compiled_calls.saves(tensor.untyped_storage())
        self.handles.append(formats.Handle(value=number, layer=self.tracker.current(), dtype=dtype, shape=shape))
        return number

    def passes(self, kind: PointKind, ordinal: int) -> None:
        """Records a point: the first pack of a value, or the first use of a handle."""
        self.points.append(formats.Point(kind=kind, handle=ordinal, op=len(self.ops)))
        self.workspace.passes_point()

    def kept_as_it_is(self, tensor: torch.Tensor) -> None:
        """Records a saved tensor that no plan moves or rebuilds."""
        if self.phase is Phase.FORWARD and is_made_of_parts(tensor):
            parts = [part for part in self.ordinary([tensor]) if storage_key(part) not in self._static]
            if parts:
                kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
                kind = kind if tensor.is_nested or tensor.layout is not torch.strided else type(tensor).__name__
                where = self.tracker.current()
                self.kept.append((kind, where, {storage_key(x): x.untyped_storage().nbytes() for x in parts}))

    def _packed_value(self, tensor: torch.Tensor) -> int:
        known = self.lifetimes.find(tensor)
        if known >= 0:
            return known
        # Created where the dispatcher does not see it: inside compiled code, or outside torch.
        part = self.compiled_calls.bearer_of(tensor.untyped_storage())
        number = self._new_value(tensor, self.tracker.current(), born=-1 if part is None else part.number)
        if part is not None:
            self.workspace.holds(part.op, len(part.op.outputs), tensor.untyped_storage())
            part.op.outputs.append(number)
        return number


@contextlib.contextmanager
def collected_after(capture: Capture, known: Collection[int] = ()) -> Iterator[None]:
    """Runs a step without the collector, and collects once after it. Values of the captured step that only this frees
    are recorded. There is no collection if all held values are ``known``, or as small as a loss.

    It is used around the captured step, and around the next one, which releases values that the captured one has left
    in attributes. A collection in the middle of the captured step would change deaths.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        held = capture.lifetimes.held()
        if sum(capture.values[one].size_bytes for one in held if one not in known) >= LEAST_BYTES:
            gc.collect()
            capture.garbage |= held - capture.lifetimes.held()
    finally:
        if was_on:
            gc.enable()

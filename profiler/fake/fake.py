"""A step without memory: its model, its inputs and its capture under a fake-tensor mode.

Fake tensors have a device, a shape, and a storage with an identity and a size, but no bytes. Ops on them compute
shapes. So the capture works as in a real step (``capture/capture.py``). Durations come from a roofline, or from running
each distinct op by itself (``op_bench.py``).

* Tensors from files, small number sequences and small constants (``torch.arange``, ``torch.zeros``) are real. Models
  read such tensors (is this mask all ones?), and the profiled step must take the same branches as the real step.
* Ops that have only real tensors run on them: all ops while a workload is *built*; views and small ops in a *step*.
* Everything else is fake: the model, tensors from ``torch.empty`` and generators, and results of ops on fake tensors.

Torch's shape functions and the CPU's kernels save different tensors for backward:

* oneDNN's LSTM keeps a workspace, the largest value of a recurrent layer. The shape function gives it 0 bytes. Its
  layout follows oneDNN's ``rnn_utils::set_offsets``: seven regions, each on its own pages. The formula agrees with
  oneDNN 3 (torch 2.13, float32) on 150 random shapes; the tests compare it with the installed library.
* The gradients of the two biases of this LSTM are two tensors, not one.
* Batch norm of half-precision features with float32 parameters keeps its statistics in float32.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poochplan.errors import StepError, named_line
from poochplan.formats.profile import Phase, PointKind
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.captured import CapturedOp
from poochplan.profiler.capture.workspace import Workspace
from poochplan.profiler.step.preserve import (
    KeptOptimizer,
    check_restorable,
    kept_generators,
    kept_gradients,
    kept_modules,
    restored,
)
from poochplan.runtime.compiled_hooks import hooks_for
from poochplan.tensors.modes import compiled_modules, hooked
from poochplan.tensors.operators import traits
from poochplan.tensors.storages import FakeMemory, Geometry, is_made_of_parts, is_plain, stands_for_memory, storage_key
from poochplan.torch_private.compiler_internals import running_as_written
from poochplan.torch_private.tensor_internals import (
    FAKE_LOG,
    OWN_DICTIONARIES,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    owned_buffers,
    owned_parameters,
    pytree,
    schema_of,
    tensors_in,
    without_modes,
)

from .op_bench import OpSpec, Recency, cache_bytes
from .roofline import Roofline, op_seconds

_CONSTANTS = frozenset({"arange", "linspace", "logspace", "eye", "zeros", "ones", "full", "scalar_tensor"})
SMALL_ELEMENTS = 1 << 20
"""Most elements of a real tensor in a step: a causal mask of 1,024 tokens."""

_TORCH_LOG = logging.getLogger(FAKE_LOG)
_NEEDS_CONTENT = (DataDependentOutputException, DynamicOutputShapeException)
_LSTM, _LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
CORRECTED = frozenset({_LSTM, _LSTM_BACKWARD, _BATCH_NORM})
"""The operators whose fake outputs :func:`corrected` changes."""
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_GATES = 4


class StepMode(FakeMemory):
    """The fake-tensor mode of one profile. State: whether a workload is being built."""

    supports_higher_order_operators = True
    """Compiled graphs have some: ops that write into their arguments. Each has its rule for fake tensors."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.building = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        leaves = tensors_in((args, kwargs))
        if not self.building:
            _refuse_real_parts(leaves, func)
        makes_constant = not leaves and schema_of(func).name.removeprefix("aten::") in _CONSTANTS
        if any(isinstance(x, FakeTensor) for x in leaves) or not (leaves or makes_constant):
            outputs = super().__torch_dispatch__(func, types, args, kwargs)
            if self.building:  # Module.to() and .half() cannot convert a parameter that has other references
                self.fake_tensor_converter.meta_converter.tensor_memo.clear()
            if func in CORRECTED:
                with self:
                    return corrected(func, args, outputs)
            return outputs
        if leaves and (self.building or traits(func).pure_view):
            return func(*args, **kwargs)
        if not _small(leaves):
            return super().__torch_dispatch__(func, types, args, kwargs)
        try:  # the fake result shows its size before memory is allocated for it
            fakes = super().__torch_dispatch__(func, types, args, kwargs)
        except _NEEDS_CONTENT:
            return func(*args, **kwargs)
        return func(*args, **kwargs) if _small(pytree.tree_leaves(fakes)) else fakes


def _refuse_real_parts(leaves: list[torch.Tensor], func: Any) -> None:
    found = next((x for x in leaves if type(x) is torch.Tensor and is_made_of_parts(x)), None)
    if found is not None:
        kind = "nested" if found.is_nested else str(found.layout).removeprefix("torch.")
        raise StepError(
            f"step(): expected dense inputs in mode fake, found a {kind} one in {func}; "
            "leave it out of the profiled step, or profile in mode run"
        )


def _small(leaves: list[Any]) -> bool:
    return all(leaf.numel() <= SMALL_ELEMENTS for leaf in leaves if isinstance(leaf, torch.Tensor))


class FakeHandle:
    """Autograd holds it in place of a saved fake tensor. ``let_go(value)`` is called when it dies."""

    __slots__ = ("geometry", "let_go", "ordinal", "used", "value")

    def __init__(self, value: int, ordinal: int, geometry: Geometry, let_go: Callable[[int], None]) -> None:
        self.value, self.ordinal, self.geometry, self.let_go = value, ordinal, geometry, let_go
        self.used = False

    def __del__(self) -> None:
        self.let_go(self.value)


class FakeCapture(Capture):
    """The capture of a step on fake tensors. Its hooks give backward new fake tensors of the same geometry.

    Each op gets its seconds from the roofline, or is described in ``specs`` to be run later.
    """

    def __init__(self, model: torch.nn.Module, mode: StepMode, roofline: Roofline | None) -> None:
        super().__init__(model, torch.device("cpu"), Workspace())
        self._mode = mode
        self.roofline = roofline
        self.specs: list[OpSpec] = []
        """One per op; empty with a roofline."""
        self._recency = Recency(cache_bytes())
        self.fused: set[int] = set()
        """Ids of ops that the compiler computes inside other kernels. The ops live as long as the capture."""
        self._uncounted = ""
        """The first op with a sparse tensor. The number of its elements depends on data."""

    def notes(self) -> list[str]:
        """A note on ops whose results depend on data, which a fake step does not have."""
        if not self._uncounted:
            return []
        return [
            f"sparse tensors may have no elements without data, first in {self._uncounted}: their bytes, and "
            "the ops on them, are estimates; profile in mode run or swap-all for exact figures"
        ]

    def _run(self, op: CapturedOp, func: Any, args: Any, kwargs: Any) -> Any:
        outputs = func(*args, **kwargs)
        tensors = tensors_in((args, kwargs, outputs)) if not self._uncounted else []
        if any(not one.is_nested and is_made_of_parts(one) for one in tensors):
            self._uncounted = f"{op.name} in {op.layer}" if op.layer else op.name
        if self.roofline is None:
            self.specs.append(OpSpec(func, args, kwargs, outputs, cached=self._found_in_cache(op)))
        else:
            op.duration_s = op_seconds(self.roofline, func, args, kwargs, outputs)
        return outputs

    def _found_in_cache(self, op: CapturedOp) -> frozenset[int]:
        """Positions of the op's inputs that the processor's cache holds when the op begins."""
        for born in self.ops[-1].outputs if self.ops else ():
            self._recency.touch(born, self.values[born].size_bytes)
        cached = frozenset(index for index, value in enumerate(op.inputs) if self._recency.holds(value))
        for value in op.inputs:
            self._recency.touch(value, self.values[value].size_bytes)
        return cached

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        hooks = hooks_for(self.model).deferring((self._pack, self._unpack), self._may_wait, self.device_type)
        with hooked(*hooks), super().running():
            yield

    def _pack(self, tensor: torch.Tensor) -> FakeHandle | torch.Tensor:
        is_static = not is_plain(tensor, self.device_type) or storage_key(tensor) in self._static
        if is_static or self.phase is not Phase.FORWARD:
            self.kept_as_it_is(tensor)
            return tensor.detach()
        ordinal, number = len(self.handles), self.saved(tensor)
        self.lifetimes.holds(number)
        return FakeHandle(number, ordinal, Geometry.of(tensor), self.lifetimes.let_go)

    def _may_wait(self, handle: FakeHandle | torch.Tensor) -> Geometry | None:
        return None if isinstance(handle, torch.Tensor) else handle.geometry

    def _unpack(self, handle: FakeHandle | torch.Tensor) -> torch.Tensor:
        if isinstance(handle, torch.Tensor):
            return handle
        if not handle.used:
            handle.used = True
            self.passes(PointKind.USE, handle.ordinal)
        # Inside the mode, its cache of dispatches would hold the storage forever.
        with self.paused(), without_modes():
            storage = torch.UntypedStorage(self.values[handle.value].size_bytes, device="meta")
            self.lifetimes.is_copied_to(storage, handle.value)
            return FakeTensor(self._mode, handle.geometry.on(storage), torch.device(self.device_type))


@contextlib.contextmanager
def building() -> Iterator[StepMode]:
    """Models, optimizers and made-up data are built in this block without memory, for :func:`faked`.

    Raises ``StepError`` if their construction needs the content of such a tensor.
    """
    mode = StepMode()
    mode.building = True
    try:
        with explained("the workload"), mode:
            yield mode
    finally:
        mode.building = False


@contextlib.contextmanager
def faked(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[StepMode]:
    """Runs the block under a fake mode. Fakes replace the tensors of the model and the optimizer.

    Afterwards the original tensors, gradients, optimizer state and generator states are restored. A model built in
    :func:`building` is used unchanged.

    Raises
    ------
    StepError
        The model has fake tensors of another mode, or the step fails without data.
    """
    check_restorable(model)
    mode = _mode_of(model) or StepMode()
    with contextlib.ExitStack() as undo:
        kept = [*kept_modules(model), *kept_gradients(model.named_parameters()), *kept_generators(model)]
        undo.enter_context(restored(kept + (KeptOptimizer(optimizer).parts() if optimizer is not None else [])))
        undo.callback(_TORCH_LOG.setLevel, _TORCH_LOG.level)
        _TORCH_LOG.setLevel(logging.CRITICAL)  # it logs the frames of errors that are raised anyway
        fakes: dict[torch.Tensor, torch.Tensor] = {}
        for module in model.modules():
            undo.callback(_restore_attributes, module, dict(module.__dict__))
            for owned in (owned_parameters(module), owned_buffers(module)):
                for name, tensor in owned.items():
                    if tensor is not None:
                        owned[name] = _faked(tensor, mode, fakes)  # type: ignore[assignment]
        if optimizer is not None:
            _replace_state(optimizer, mode, fakes)
        if not compiled_modules(model):  # the graphs of those are interpreted, and so are those of functions
            undo.enter_context(running_as_written())
        with explained("step()"), mode:
            yield mode


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Replaces the errors of fake tensors by one clear line."""
    try:
        yield
    except (*_NEEDS_CONTENT, UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
        operator = getattr(error, "func", None) or getattr(error, "reason", "") or type(error).__name__
        lacks = "needs a tensor's content" if isinstance(error, _NEEDS_CONTENT) else "has no shape function"
        raise StepError(
            f"{what}: expected ops that run without data in mode fake, found {operator}, which {lacks}; "
            "leave it out of the profiled step, or profile in mode run"
        ) from error
    except Exception as error:
        is_torchs = type(error).__module__.partition(".")[0] in ("builtins", "torch")
        if not is_torchs or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise  # a class of the user's, or of ours
        found = named_line(error).rstrip(".")
        raise StepError(
            f"{what}: expected code that runs without data in mode fake, found that it raises {found}; leave "
            "that out of the profiled step, or profile in mode run, where tensors have data"
        ) from error


def _mode_of(model: torch.nn.Module) -> StepMode | None:
    """The mode of the model's fake tensors; None if they are real."""
    found: StepMode | None = None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, FakeTensor):
            if not isinstance(tensor.fake_mode, StepMode):
                raise StepError(
                    "model: expected real tensors or fake ones made inside poochplan.profiler.fake.fake.building(), "
                    f"found {name} of another fake-tensor mode; build the model there"
                )
            found = tensor.fake_mode
    return found


def _faked(tensor: torch.Tensor, mode: StepMode, fakes: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The fake of a real parameter or buffer, and of its gradient. Tied parameters share one fake."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor not in fakes:
        fakes[tensor] = mode.from_tensor(tensor)
        fakes[tensor].grad = None if tensor.grad is None else mode.from_tensor(tensor.grad)
    return fakes[tensor]


def _restore_attributes(module: torch.nn.Module, before: dict[str, Any]) -> None:
    """Restores attributes in which the step has left fake tensors. Others stay: hooks of the step may need them."""
    for name, value in list(module.__dict__.items()):
        if name not in OWN_DICTIONARIES and any(map(stands_for_memory, tensors_in(value))):
            del module.__dict__[name]
            if name in before:
                module.__dict__[name] = before[name]


def _replace_state(optimizer: torch.optim.Optimizer, mode: StepMode, fakes: dict[torch.Tensor, torch.Tensor]) -> None:
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    optimizer.state.clear()
    for parameter, entries in state.items():
        optimizer.state[_faked(parameter, mode, fakes)] = {
            # Adam reads the number in its counter.
            name: (value.clone() if value.ndim == 0 else mode.from_tensor(value)) if torch.is_tensor(value) else value
            for name, value in entries.items()
        }
    for group in optimizer.param_groups:
        group["params"] = [_faked(parameter, mode, fakes) for parameter in group["params"]]


def corrected(func: Any, args: Any, outputs: Any) -> Any:
    """The fake outputs of a :data:`CORRECTED` op, as its kernel would make them. It is called under the fake mode."""
    if func is _LSTM_BACKWARD:
        return *outputs[:4], torch.empty_like(outputs[3]), *outputs[5:]
    if func is _LSTM and args[15]:  # train
        length, batch, features = args[0].shape
        size_bytes = workspace_bytes(length, batch, features, hidden=args[10], element_bytes=args[0].element_size())
        return *outputs[:3], torch.empty(size_bytes, dtype=torch.uint8, device=args[0].device)
    if func is _BATCH_NORM and args[1] is not None and args[1].dtype is not args[0].dtype:
        return outputs[0], *(statistic.to(args[1].dtype) for statistic in outputs[1:])
    return outputs


def workspace_bytes(length: int, batch: int, features: int, hidden: int, element_bytes: int = 4) -> int:
    """Bytes that one layer of oneDNN's LSTM keeps from forward to backward, for one direction.

    ``length`` time steps of ``batch`` sequences with ``features`` inputs and ``hidden`` units.
    """
    rows, state_rows = length * batch, 2 * (length + 1) * batch

    def padded(columns: int) -> int:
        """Elements of a row: whole cache lines, but no multiple of 256, whose rows would share cache sets."""
        line = _LINE_BYTES // element_bytes
        row = -(-columns // line) * line
        return row + line if row % 256 == 0 else row

    regions = [
        rows * padded(_GATES * hidden),
        rows * padded(hidden),
        *[state_rows * padded(max(features, hidden))] * 3,
        *[state_rows * hidden] * 2,
    ]
    return sum(-(-region * element_bytes // _PAGE_BYTES) * _PAGE_BYTES for region in regions)

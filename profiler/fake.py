"""A step without memory: its model, its inputs and its capture under a fake-tensor mode.

Fake tensors have a device, a shape and a storage with an identity and a size, and no bytes; ops on them compute shapes.
So the capture is that of a real step (``capture.py``), and durations come from a roofline.

There are two borders. While a workload is *built*, what comes from files stays real, and ops on real tensors alone run
really (they may depend on data), short number sequences (``torch.arange``) included; what else is made of nothing
(``torch.empty``, ``torch.randn``) is fake, and so is all that touches a fake tensor. While a *step* runs, every real tensor that reaches an op is replaced by one fake, the same each
time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import StepError
from ..runtime.modes import compiled_modules
from ..runtime.storages import FakeMemory, Geometry
from .capture import Capture, CapturedHandle
from .layers import LayerTracker
from .roofline import Roofline, op_seconds


_SEQUENCES = frozenset({"aten::arange", "aten::linspace", "aten::logspace", "aten::eye"})
_KNOWN_NUMBERS = 64
"""Sequences up to this long keep their content also in a step: code counts dimensions with them."""


class StepMode(FakeMemory):
    """The fake-tensor mode of one profile. State: whether it builds or steps, and the fakes of real tensors."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.building = False
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of the real tensor, which is held so that the identity stays its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.building and _stays_real(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        args, kwargs = self.border(func, args, kwargs or {})
        if func._schema.name in _SEQUENCES:
            numbers = func(*args, **kwargs)
            if numbers.numel() <= _KNOWN_NUMBERS:
                return self._with_content(numbers)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def border(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments with fakes for real tensors; those of a literal (``torch.tensor(3.0)``) keep their content."""
        if func is torch.ops.aten.lift_fresh.default:
            return args, kwargs
        return pytree.tree_map_only(torch.Tensor, self.fake, (args, kwargs))

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself when it is fake, otherwise the one fake that stands for it in this mode."""
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._fakes.get(id(tensor))
        if known is None:
            with _disable_current_modes():
                known = self._fakes[id(tensor)] = tensor, self._made(tensor)
        return known[1]

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 and not tensor.requires_grad:  # a counter, such as Adam's: its content is asked for
            return self._with_content(tensor.detach().clone())
        return self.from_tensor(tensor)

    def _with_content(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake that answers when it is asked for a number; the mode writes on ``tensor``, so it must be its own."""
        return self.fake_tensor_converter.from_real_tensor(self, tensor, make_constant=True)


def _stays_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op of the building touches real tensors alone, or makes a sequence of numbers."""
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return not any(isinstance(x, FakeTensor) for x in leaves) and (bool(leaves) or func._schema.name in _SEQUENCES)


class FakeCapture(Capture):
    """The capture of a step on fake tensors; an op takes the seconds of a roofline."""

    def __init__(self, tracker: LayerTracker, static: set[int], mode: StepMode, roofline: Roofline) -> None:
        super().__init__("cpu", tracker, static)
        self._mode = mode
        self._roofline = roofline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._mode.border(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def pack(self, tensor: torch.Tensor) -> CapturedHandle | torch.Tensor:
        return super().pack(self._mode.fake(tensor))

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        outputs = func(*args, **kwargs)
        return outputs, op_seconds(self._roofline, func, args, kwargs, outputs)

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return torch.UntypedStorage(storage.nbytes(), device="meta")  # nothing to copy

    def _on(self, storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
        # Made outside the mode, whose cache of dispatches would hold the storage for good.
        with _disable_current_modes():
            return FakeTensor(self._mode, geometry.on(storage), torch.device(self.device_type))


@contextlib.contextmanager
def building() -> Iterator[StepMode]:
    """Inside the block, models, optimizers and made-up data are built without memory; :func:`faked` takes them.

    Raises ``StepError`` when the building needs the content of such a tensor.
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
    """Runs the block under a fake mode with fakes in the place of the model's and the optimizer's tensors.

    Afterwards the very same tensors, gradients, optimizer state and generator states are back. A model that was built
    in :func:`building` is taken as it is.

    Raises
    ------
    StepError
        A compiled callable, fake tensors of another mode, or a step that needs the content of a tensor.
    """
    compiled = compiled_modules(model)
    if compiled:
        raise StepError(
            f"model: expected no compiled callable in mode fake, found {next(iter(compiled)) or 'the model itself'}; "
            "profile the model as it is before torch.compile"
        )
    mode = _mode_of(model) or StepMode()
    with contextlib.ExitStack() as undo:
        undo.callback(_restore_generators, random.getstate(), np.random.get_state(), torch.get_rng_state())
        fakes: dict[torch.Tensor, torch.Tensor] = {}
        for module in model.modules():
            _replace_tensors(module, mode, fakes, undo)
        if optimizer is not None:
            _replace_state(optimizer, mode, fakes, undo)
        with explained("step()"), mode:
            yield mode


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """One clear line in place of the errors of fake tensors."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        operator = getattr(error, "func", None) or getattr(error, "reason", "") or type(error).__name__
        raise StepError(
            f"{what}: expected a step that can run without data, found {operator}, which needs a tensor's content; "
            "leave it out of the profiled step, or profile in mode run"
        ) from error


def _mode_of(model: torch.nn.Module) -> StepMode | None:
    """The mode of the model's fake tensors; None when they are real."""
    found: StepMode | None = None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, FakeTensor):
            if not isinstance(tensor.fake_mode, StepMode):
                raise StepError(
                    f"model: expected real tensors or fake ones made inside poochplan.profiler.fake.building(), found "
                    f"{name} of another fake-tensor mode; build the model there"
                )
            found = tensor.fake_mode
    return found


def _fake_parameter(tensor: torch.Tensor, mode: StepMode, fakes: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A fake of its own for a real parameter or buffer; tied ones share one."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor not in fakes:
        fakes[tensor] = mode.fake(tensor)
        fakes[tensor].grad = None if tensor.grad is None else mode.fake(tensor.grad)
    return fakes[tensor]


def _replace_tensors(
    module: torch.nn.Module, mode: StepMode, fakes: dict[torch.Tensor, torch.Tensor], undo: contextlib.ExitStack
) -> None:
    for owned in (module._parameters, module._buffers):
        before = dict(owned)
        gradients = [(x, x.grad) for x in before.values() if isinstance(x, torch.nn.Parameter)]
        undo.callback(_restore_tensors, owned, before, gradients)
        for name, tensor in before.items():
            if tensor is not None:
                owned[name] = _fake_parameter(tensor, mode, fakes)  # type: ignore[assignment]
    undo.callback(setattr, module, "training", module.training)


def _restore_tensors(owned: dict[str, Any], before: dict[str, Any], gradients: list[Any]) -> None:
    owned.clear()
    owned.update(before)
    for parameter, gradient in gradients:
        parameter.grad = gradient


def _replace_state(
    optimizer: torch.optim.Optimizer,
    mode: StepMode,
    fakes: dict[torch.Tensor, torch.Tensor],
    undo: contextlib.ExitStack,
) -> None:
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    undo.callback(_restore_optimizer, optimizer, state, groups)
    optimizer.state.clear()
    for parameter, entries in state.items():
        optimizer.state[_fake_parameter(parameter, mode, fakes)] = {
            name: mode.fake(value) if isinstance(value, torch.Tensor) else value for name, value in entries.items()
        }
    for group in optimizer.param_groups:
        group["params"] = [_fake_parameter(parameter, mode, fakes) for parameter in group["params"]]


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: Any, groups: Any) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, content in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(content)


def _restore_generators(python: Any, numpy: Any, cpu: torch.Tensor) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)

"""Leaves the user's model, optimizer and generators as they were before the profile. If that fails, an error says what
differs.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from poochplan.errors import StepError, UsageError
from poochplan.tensors.storages import is_made_of_parts, parts_of, storage_key
from poochplan.torch_private.tensor_internals import (
    OWN_DICTIONARIES,
    is_zero,
    non_persistent_buffers,
    owned_buffers,
    owned_parameters,
    pytree,
    set_non_persistent_buffers,
)

_NAMED_IN_MESSAGE = 3
Action = tuple[str, Callable[[], object]]
"""The name of what it restores, for a message, and the call that does so; the call may be repeated."""
NamedTensor = tuple[str, torch.Tensor]


@contextlib.contextmanager
def preserved(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restores after the block, on every path out of it: parameters, gradients, buffers, modules and their training
    flags, optimizer state and groups, and generators (each state says what it does not cover). Tensors keep their
    identity and storage. Their contents are kept in host memory, so that the device has what it has in training. That
    and a checksum before and after take about as long as reading the contents four times, some 2 s for 1 GB.

    Raises
    ------
    UsageError
        Before the block: a part of the model or the optimizer could not be restored.
    StepError
        After it: a part is not as it was. Everything that could be restored is.
    """
    check_restorable(model)
    with restored(*_states(model, optimizer)):
        yield


def _states(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[State]:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    optimizers = [OptimizerState(optimizer, names)] if optimizer is not None else []
    parameters = optimizers[0].parameters if optimizers else [(name, p) for p, name in names.items()]
    gradients = GradientStates(parameters)
    contents = TensorContents(
        [*parameters, *model.named_buffers(), *gradients.tensors, *(t for state in optimizers for t in state.tensors)]
    )
    # In this order, because a gradient only fits a parameter whose tensor is restored.
    return [ModuleStates(model), contents, gradients, *optimizers, GeneratorStates(model)]


def check_restorable(model: torch.nn.Module) -> None:
    """Raises ``UsageError`` for a model with modules or parameters that cannot be restored."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"model: expected modules in Python, found TorchScript (torch.jit.script, trace or load) in "
                f"{path or 'the model itself'}, which takes no hooks and whose tables cannot be restored; "
                "profile the module that it was made of"
            )
        for name, tensor in (*owned_parameters(module).items(), *owned_buffers(module).items()):
            if tensor is not None and torch.nn.parameter.is_lazy(tensor):
                raise UsageError(
                    f"model: expected parameters and buffers with data, found {name} of {path or 'the model'} not yet "
                    "initialised, which the first step would make for good; run one forward before the profile"
                )


@contextlib.contextmanager
def restored(*states: State) -> Iterator[None]:
    """Restores the states after the block, on every path out of it; raises ``StepError`` if one is not restored."""
    try:
        yield
    finally:
        restore(states)


def restore(states: Sequence[State]) -> None:
    """Attempts every action of every state, then asks each state what is not as it was. An interrupt meanwhile is
    delayed.
    """
    failed: dict[str, str] = {}
    interrupt: KeyboardInterrupt | None = None
    with torch.no_grad():
        for state in states:
            for action in state.actions():
                interrupt = _attempt(action, failed) or interrupt
        for state in states:
            found: list[str] = []
            interrupt = _attempt((f"all of {type(state).__name__}", _checking(state, found)), failed) or interrupt
            failed |= {name: failed.get(name, "") for name in found}
    if failed:
        raise StepError(_message(failed)) from interrupt
    if interrupt is not None:
        raise interrupt


def _checking(state: State, found: list[str]) -> Callable[[], object]:
    def check() -> None:
        found[:] = state.changed()

    return check


def _attempt(action: Action, failed: dict[str, str]) -> KeyboardInterrupt | None:
    """Runs the action to its end; records under its name why it failed."""
    name, run = action
    interrupt = None
    while True:
        try:
            run()
            return interrupt
        except KeyboardInterrupt as error:
            interrupt = error
        except Exception as error:
            failed[name] = f" ({type(error).__name__}: {first_line(error)})"
            return interrupt


def _message(failed: dict[str, str]) -> str:
    named = [name + why for name, why in list(failed.items())[:_NAMED_IN_MESSAGE]]
    more = f" and {len(failed) - len(named)} more" if len(failed) > len(named) else ""
    return (
        f"model: expected everything as it was before the profile, could not restore {', '.join(named)}{more}; "
        "build model and optimizer anew before training on"
    )


class _Kept(NamedTuple):
    """One tensor. ``whole`` is a copy of a sparse or nested one; ``alias`` is the base of any other one that was a
    view.
    """

    tensor: torch.Tensor
    whole: torch.Tensor | None
    alias: torch.Tensor | None
    checksum: tuple[Any, ...]


class TensorContents:
    """The contents of the tensors, and their geometry on their storages. Each storage is kept once: tied tensors share
    one, and elements of an expanded tensor overlap. Sparse and nested tensors are copied.

    Raises ``UsageError`` naming the first tensor without contents that can be kept.
    """

    def __init__(self, tensors: Iterable[NamedTensor]) -> None:
        self._saved: dict[int, tuple[str, torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._kept: dict[str, _Kept] = {}
        sums: dict[int, int] = {}
        for name, tensor in tensors:
            try:
                self._kept[name] = self._keep(name, tensor, sums)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                raise UsageError(
                    f"{name}: expected a tensor whose content can be kept and restored after the profile, found a "
                    f"{_kind(tensor)} ({first_line(error)}); give it data, or leave it out of what is profiled"
                ) from error

    def actions(self) -> Iterator[Action]:
        for name, kept in self._kept.items():
            yield name, lambda kept=kept: _put_contents_back(kept)  # type: ignore[misc]
        for name, storage, saved in self._saved.values():
            yield name, lambda storage=storage, saved=saved: _write(storage, saved)  # type: ignore[misc]

    def changed(self) -> list[str]:
        sums: dict[int, int] = {}
        return [name for name, kept in self._kept.items() if _checksum(kept.tensor, sums) != kept.checksum]

    def _keep(self, name: str, tensor: torch.Tensor, sums: dict[int, int]) -> _Kept:
        if is_made_of_parts(tensor) and not hasattr(tensor, "__tensor_flatten__"):
            return _Kept(tensor, tensor.detach().to("cpu", copy=True), None, _checksum(tensor, sums))
        for part in parts_of(tensor):
            if is_zero(part):  # nothing can write it
                continue
            key = storage_key(part)
            if key not in self._saved:
                storage = part.untyped_storage()
                self._saved[key] = name, storage, _on_host(storage, copy=True)
        alias = None if is_made_of_parts(tensor) else tensor.data
        return _Kept(tensor, None, alias, _checksum(tensor, sums))


def _put_contents_back(kept: _Kept) -> None:
    tensor, alias = kept.tensor, kept.alias
    if kept.whole is not None:
        if tensor.layout is torch.sparse_coo:
            tensor.data = kept.whole.to(tensor.device)  # copy_ would give new parts to its alias alone
        else:
            tensor.data.copy_(kept.whole)
    elif alias is not None and _geometry(tensor) != _geometry(alias):
        tensor.data = alias


def _write(storage: torch.UntypedStorage, saved: torch.UntypedStorage) -> None:
    if storage.nbytes() != saved.nbytes():
        storage.resize_(saved.nbytes())
    storage.copy_(saved)


def _on_host(storage: torch.UntypedStorage, *, copy: bool) -> torch.UntypedStorage:
    if storage.device.type == "cpu":
        return storage.clone() if copy else storage
    if storage.device.type == "meta":
        raise ValueError("it has no memory")
    return storage.cpu()


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _checksum(tensor: torch.Tensor, sums: dict[int, int]) -> tuple[Any, ...]:
    """Checksum of the tensor's geometry and of its storages' bytes; ``sums`` has those that were read already."""
    found: list[Any] = [type(tensor), tensor.shape, tensor.dtype]
    if is_made_of_parts(tensor):  # its parts may be made anew each time, at other addresses
        found += [(part.shape, part.dtype, _crc(part.clone().untyped_storage())) for part in parts_of(tensor)]
        return tuple(found)
    key = storage_key(tensor)
    if key not in sums:
        sums[key] = 0 if is_zero(tensor) else _crc(tensor.untyped_storage())
    return (*found, _geometry(tensor), sums[key])


def _crc(storage: torch.UntypedStorage) -> int:
    # CRC-32: finds every change within 32 consecutive bits, and misses one in 4e9 of the others; at about 1 GB/s.
    held = _on_host(storage, copy=False)
    # By its address, because a NumPy array would make the user's storage impossible to resize.
    return zlib.crc32((ctypes.c_char * held.nbytes()).from_address(held.data_ptr())) if held.nbytes() else 0


def _kind(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of {str(tensor.layout).removeprefix('torch.')} layout on {tensor.device}"


class State(Protocol):
    """A state; it is read when the object is made."""

    def actions(self) -> Iterable[Action]:
        """The actions that restore it; each is attempted, even if others fail."""
        ...

    def changed(self) -> list[str]:
        """Names of the parts that are not as they were."""
        ...


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


class GeneratorStates:
    """States of the global generators of torch (the CPU's, and every CUDA device's once CUDA is in use), NumPy and
    Python, and of each ``torch.Generator`` that is an attribute of one of ``model``'s modules.

    Not covered: generators that only the step, a data set or a sampler holds, and ``numpy.random.Generator`` and
    ``random.Random`` objects.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._kept = [(name, get, put, get()) for name, get, put in _generators(model)]

    def actions(self) -> Iterator[Action]:
        for name, _, put, state in self._kept:
            yield name, lambda put=put, state=state: put(state)  # type: ignore[misc]

    def changed(self) -> list[str]:
        return [name for name, get, _, state in self._kept if _plain(get()) != _plain(state)]


def _generators(model: torch.nn.Module | None) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    named = {"torch's generator of cpu": torch.default_generator}
    if torch.cuda.is_initialized():
        named |= {f"torch's generator of {g.device}": g for g in torch.cuda.default_generators}
    for path, module in model.named_modules() if model is not None else ():
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator):
                named[f"generator {path}.{name}".replace(" .", " ")] = value
    for name, generator in named.items():
        yield name, generator.get_state, generator.set_state
    yield "NumPy's generator", np.random.get_state, np.random.set_state
    yield "Python's generator", random.getstate, random.setstate


def _plain(state: Any) -> list[Any]:
    arrays = (leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(state))
    return [leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf for leaf in arrays]


class OptimizerState:
    """The optimizer's state and parameter groups: their containers, the entries of each, and the tensors.

    Containers and tensors keep their identity; :class:`TensorContents` restores the tensors' contents. Other values are
    deep copies; ``UsageError`` if they cannot be copied. Other attributes of the optimizer than ``state`` and
    ``param_groups`` are not covered, nor are related objects: schedulers, gradient scalers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str] | None = None) -> None:
        self._names = names or {}
        self._containers: dict[int, tuple[str, Any, Any]] = {}
        self.tensors: list[NamedTensor] = []
        """All of its tensors, without parameters."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._names.setdefault(parameter, f"parameter {len(self._names)} of the optimizer")
        try:
            self._keep(optimizer.state, "optimizer state")
            self._keep(optimizer.param_groups, "optimizer group")
        except Exception as error:  # copying a user's object may raise anything
            raise UsageError(
                "optimizer: expected state and groups that can be copied, to be restored after the profile, found "
                f"{type(error).__name__} ({first_line(error)}); leave what cannot be copied out of them"
            ) from error

    @property
    def parameters(self) -> list[NamedTensor]:
        """The parameters named by the caller, and all others of the optimizer."""
        return [(name, parameter) for parameter, name in self._names.items()]

    def actions(self) -> Iterator[Action]:
        for name, container, content in self._containers.values():
            yield name, lambda container=container, content=content: _refill(container, content)  # type: ignore[misc]

    def changed(self) -> list[str]:
        return [name for name, container, content in self._containers.values() if not _same(container, content)]

    def _keep(self, value: Any, path: str) -> Any:
        """``value`` itself if its identity is to be restored, otherwise a copy."""
        if isinstance(value, torch.Tensor):
            if value not in self._names:
                self.tensors.append((path, value))
            return value
        if isinstance(value, dict | list):
            if id(value) not in self._containers:
                self._containers[id(value)] = path, value, None  # known now, in case it holds itself
                self._containers[id(value)] = path, value, self._content(value, path)
            return value
        if isinstance(value, tuple):
            kept = [self._keep(item, f"{path} {index}") for index, item in enumerate(value)]
            return value if all(x is y for x, y in zip(kept, value, strict=True)) else copy.deepcopy(value)
        return copy.deepcopy(value)

    def _content(self, container: Any, path: str) -> Any:
        if isinstance(container, list):
            return [self._keep(item, f"{path} {index}") for index, item in enumerate(container)]
        return {key: self._keep(item, f"{path} {self._key(key)}") for key, item in container.items()}

    def _key(self, key: Any) -> str:
        return f"of {self._names.get(key, 'a tensor')}" if isinstance(key, torch.Tensor) else str(key)


def _refill(container: Any, content: Any) -> None:
    if not _same(container, content):
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _same(container: Any, content: Any) -> bool:
    """Whether both hold the same objects in the same order."""
    found, kept = (
        list(x) if isinstance(x, list) else [part for item in x.items() for part in item] for x in (container, content)
    )
    return len(found) == len(kept) and all(
        x is y or (isinstance(x, str) and x == y) for x, y in zip(found, kept, strict=True)
    )


class _Module(NamedTuple):
    module: torch.nn.Module
    type: type[torch.nn.Module]
    tables: dict[str, tuple[Any, dict[str, Any]]]
    non_persistent: set[str]
    training: bool


class ModuleStates:
    """For each module its parameters, buffers and submodules, as objects under their names, its class (which a
    parametrization changes) and its training flag. Other attributes and hooks are not covered.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept = {f"module {path}" if path else "the model": _taken(m) for path, m in model.named_modules()}

    def actions(self) -> Iterator[Action]:
        for name, kept in self._kept.items():
            yield name, lambda kept=kept: _put_back(kept)  # type: ignore[misc]

    def changed(self) -> list[str]:
        return [name for name, kept in self._kept.items() if not _is_back(kept)]


def _taken(module: torch.nn.Module) -> _Module:
    tables = {name: (module.__dict__[name], dict(module.__dict__[name])) for name in OWN_DICTIONARIES}
    return _Module(module, type(module), tables, set(non_persistent_buffers(module)), module.training)


def _put_back(kept: _Module) -> None:
    module = kept.module
    if type(module) is not kept.type:
        module.__class__ = kept.type
    for name, (table, content) in kept.tables.items():
        module.__dict__[name] = table
        _refill(table, content)
    set_non_persistent_buffers(module, kept.non_persistent)
    if module.training != kept.training:  # assigning it makes a compiled module compile again
        module.training = kept.training


def _is_back(kept: _Module) -> bool:
    module = kept.module
    return (
        type(module) is kept.type
        and module.training == kept.training
        and non_persistent_buffers(module) == kept.non_persistent
        and all(module.__dict__[name] is t and _same(t, content) for name, (t, content) in kept.tables.items())
    )


class GradientStates:
    """Each parameter's gradient tensor, and whether it requires one; the gradients' contents are not covered."""

    def __init__(self, parameters: Iterable[NamedTensor]) -> None:
        self._kept = [(f"gradient of {name}", p, p.grad, p.requires_grad) for name, p in parameters]

    @property
    def tensors(self) -> list[NamedTensor]:
        return [(name, gradient) for name, _, gradient, _ in self._kept if gradient is not None]

    def actions(self) -> Iterator[Action]:
        for name, *kept in self._kept:
            yield name, lambda kept=kept: _put_gradient_back(*kept)  # type: ignore[misc]

    def changed(self) -> list[str]:
        return [n for n, p, gradient, wanted in self._kept if p.grad is not gradient or p.requires_grad != wanted]


def _put_gradient_back(parameter: torch.Tensor, gradient: torch.Tensor | None, requires_grad: bool) -> None:
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)
    if parameter.grad is not gradient:
        parameter.grad = gradient

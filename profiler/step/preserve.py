"""Leaves the user's model, optimizer and generators as they were before the profile, or an error says what differs."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from poochplan.errors import StepError, UsageError
from poochplan.runtime.devices.backend import Generator, backends_in_use
from poochplan.tensors.storages import Geometry, is_made_of_parts, parts_of, plain_storage, storage_key
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
NamedTensor = tuple[str, torch.Tensor]


class Kept(NamedTuple):
    """A part of the user's state, as it was when this was made."""

    name: str
    """For a message."""
    put_back: Callable[[], object]
    """Restores it; may be repeated."""
    is_back: Callable[[], bool]
    """Whether it is as it was."""


@contextlib.contextmanager
def preserved(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restores after the block, on every path out of it: parameters, gradients, buffers, modules and their training
    flags, optimizer state and groups, and generators (each function says what it does not cover). Tensors keep their
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
    with restored(_all_of(model, optimizer)):
        yield


def _all_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Kept]:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    optimizers = [KeptOptimizer(optimizer, names)] if optimizer is not None else []
    parameters = optimizers[0].parameters if optimizers else [(name, p) for p, name in names.items()]
    gradients = [(f"gradient of {name}", p.grad) for name, p in parameters if p.grad is not None]
    tensors = [*parameters, *model.named_buffers(), *gradients, *(t for one in optimizers for t in one.tensors)]
    # In this order: a gradient fits a parameter whose tensor is back.
    return [
        *kept_modules(model),
        *kept_contents(tensors),
        *kept_gradients(parameters),
        *(part for one in optimizers for part in one.parts()),
        *kept_generators(model),
    ]


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
def restored(parts: Sequence[Kept]) -> Iterator[None]:
    """Restores the parts after the block, on every path out of it; raises ``StepError`` if one is not restored.

    Every part is attempted, even if others fail. An interrupt meanwhile is delayed.
    """
    failed: dict[str, str] = {}
    interrupt: KeyboardInterrupt | None = None

    def check(part: Kept) -> None:
        if not part.is_back():
            failed.setdefault(part.name, "")

    try:
        yield
    finally:
        with torch.no_grad():
            for part in parts:
                interrupt = _attempt(part.name, part.put_back, failed) or interrupt
            for part in parts:
                interrupt = _attempt(part.name, partial(check, part), failed) or interrupt
        if failed:
            raise StepError(_message(failed)) from interrupt
        if interrupt is not None:
            raise interrupt


def _attempt(name: str, run: Callable[[], object], failed: dict[str, str]) -> KeyboardInterrupt | None:
    """Runs it to its end; records under the name why it failed."""
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


def kept_contents(tensors: Iterable[NamedTensor]) -> list[Kept]:
    """The contents of the tensors, and their geometry on their storages. Each storage is kept once: tied tensors share
    one, and elements of an expanded tensor overlap. Sparse and nested tensors are copied.

    Raises ``UsageError`` naming the first tensor without contents that can be kept.
    """
    parts: list[Kept] = []
    storages: dict[int, Kept] = {}
    for name, tensor in tensors:
        try:
            parts.append(_kept_tensor(name, tensor, storages))
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            raise UsageError(
                f"{name}: expected a tensor whose content can be kept and restored after the profile, found a "
                f"{_kind(tensor)} ({first_line(error)}); give it data, or leave it out of what is profiled"
            ) from error
    return [*parts, *storages.values()]


def _kept_tensor(name: str, tensor: torch.Tensor, storages: dict[int, Kept]) -> Kept:
    """The tensor without the bytes of its storages, which are added to ``storages`` by their keys."""
    if is_made_of_parts(tensor) and not hasattr(tensor, "__tensor_flatten__"):
        whole = tensor.detach().to("cpu", copy=True)

        def put_back() -> None:
            if tensor.layout is torch.sparse_coo:
                tensor.data = whole.to(tensor.device)  # copy_ gives it new parts, and its alias alone would have them
            else:
                tensor.data.copy_(whole)

    else:
        alias_of, geometry = (None, None) if is_made_of_parts(tensor) else (_kept_alias(tensor), _geometry(tensor))

        def put_back() -> None:
            if alias_of is not None and _geometry(tensor) != geometry:
                tensor.data = alias_of()

        for part in parts_of(tensor):
            if not is_zero(part) and storage_key(part) not in storages:  # nothing can write a zero
                storages[storage_key(part)] = _kept_storage(name, part.untyped_storage())
    facts = _facts(tensor)
    return Kept(name, put_back, lambda: _facts(tensor) == facts)


def _kept_alias(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Gives a tensor on the memory that this one has now. Until then no other tensor has that memory, if it is an
    ordinary one: state that is shared would stay on the device.
    """
    storage = plain_storage(tensor, tensor.device.type)
    if storage is not None:
        return partial(Geometry.of(tensor).on, storage)
    alias = tensor.data
    return lambda: alias


def _kept_storage(name: str, storage: torch.UntypedStorage) -> Kept:
    saved = _on_host(storage, copy=True)
    checksum = _crc(saved)
    return Kept(name, partial(_write, storage, saved), lambda: _crc(storage) == checksum)


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


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The tensor's type and geometry; for one that is made of parts, also the checksums of their bytes."""
    found = type(tensor), tensor.shape, tensor.dtype
    if is_made_of_parts(tensor):  # which may be made anew each time, and lie elsewhere
        return *found, *((part.shape, part.dtype, _crc(part.clone().untyped_storage())) for part in parts_of(tensor))
    return *found, _geometry(tensor)


def _crc(storage: torch.UntypedStorage) -> int:
    # CRC-32: finds every change within 32 consecutive bits, and misses one in 4e9 of the others; at about 1 GB/s.
    held = _on_host(storage, copy=False)
    # By its address, because a NumPy array would make the user's storage impossible to resize.
    return zlib.crc32((ctypes.c_char * held.nbytes()).from_address(held.data_ptr())) if held.nbytes() else 0


def _kind(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of {str(tensor.layout).removeprefix('torch.')} layout on {tensor.device}"


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def kept_generators(model: torch.nn.Module | None = None) -> list[Kept]:
    """States of the global generators of torch (the CPU's, and those of accelerators once they are in use), NumPy and
    Python, and of each ``torch.Generator`` that is an attribute of one of ``model``'s modules.

    Not covered: generators that only the step or its data hold, ``numpy.random.Generator``, ``random.Random``.
    """
    named: dict[str, Generator] = {"torch's generator of cpu": torch.default_generator}
    named |= {f"torch's generator of {there.where}": there.generator() for there in backends_in_use()}
    for path, module in model.named_modules() if model is not None else ():
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator):
                named[f"generator {path}.{name}".replace(" .", " ")] = value
    found = [_kept_state(name, one.get_state, one.set_state) for name, one in named.items()]
    numpy = _kept_state("NumPy's generator", np.random.get_state, np.random.set_state)
    return [*found, numpy, _kept_state("Python's generator", random.getstate, random.setstate)]


def _kept_state(name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> Kept:
    state = get()
    return Kept(name, partial(put, state), lambda: _plain(get()) == _plain(state))


def _plain(state: Any) -> list[Any]:
    arrays = (leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(state))
    return [leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf for leaf in arrays]


class KeptOptimizer:
    """The optimizer's state and parameter groups: their containers, the entries of each, and the tensors.

    Containers and tensors keep their identity; :func:`kept_contents` restores the tensors' contents. Other values are
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

    def parts(self) -> list[Kept]:
        return [
            Kept(name, partial(_refill, container, content), partial(_same, container, content))
            for name, container, content in self._containers.values()
        ]

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
    found, kept = (
        list(x) if isinstance(x, list) else [part for item in x.items() for part in item] for x in (container, content)
    )
    return len(found) == len(kept) and all(
        x is y or (isinstance(x, str) and x == y) for x, y in zip(found, kept, strict=True)
    )


def kept_modules(model: torch.nn.Module) -> list[Kept]:
    """For each module its parameters, buffers and submodules, as objects under their names, its class (which a
    parametrization changes) and its training flag. Other attributes and hooks are not covered.
    """
    return [_kept_module(f"module {path}" if path else "the model", module) for path, module in model.named_modules()]


def _kept_module(name: str, module: torch.nn.Module) -> Kept:
    kind, training, non_persistent = type(module), module.training, set(non_persistent_buffers(module))
    tables = {name: (module.__dict__[name], dict(module.__dict__[name])) for name in OWN_DICTIONARIES}

    def put_back() -> None:
        if type(module) is not kind:
            module.__class__ = kind
        for name, (table, content) in tables.items():
            module.__dict__[name] = table
            _refill(table, content)
        set_non_persistent_buffers(module, non_persistent)
        if module.training != training:  # assigned to a compiled module, it is a reason to compile again
            module.training = training

    def is_back() -> bool:
        return (
            type(module) is kind
            and module.training == training
            and non_persistent_buffers(module) == non_persistent
            and all(module.__dict__[name] is t and _same(t, content) for name, (t, content) in tables.items())
        )

    return Kept(name, put_back, is_back)


def kept_gradients(parameters: Iterable[NamedTensor]) -> list[Kept]:
    """Each parameter's gradient tensor, and whether it requires one; the gradients' contents are not covered."""
    return [_kept_gradient(f"gradient of {name}", parameter) for name, parameter in parameters]


def _kept_gradient(name: str, parameter: torch.Tensor) -> Kept:
    gradient, requires_grad = parameter.grad, parameter.requires_grad

    def put_back() -> None:
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
        if parameter.grad is not gradient:
            parameter.grad = gradient

    return Kept(name, put_back, lambda: parameter.grad is gradient and parameter.requires_grad == requires_grad)

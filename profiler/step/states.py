"""What a profile changes beside the contents of tensors, each as it was when it was taken: generators, the optimizer,
modules, gradients.

Each state gives its restoring actions one by one, and what is not back when they are through; ``preserve.py`` runs
them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from poochplan.errors import UsageError
from poochplan.torch_private.tensor_internals import (
    OWN_DICTIONARIES,
    non_persistent_buffers,
    pytree,
    set_non_persistent_buffers,
)

Action = tuple[str, Callable[[], object]]
"""What it restores, for a message; and the call that does so, which may be made again."""
NamedTensor = tuple[str, torch.Tensor]


class State(Protocol):
    """Taken when it is made."""

    def actions(self) -> Iterable[Action]:
        """What puts it back; each is attempted, whatever the others do."""
        ...

    def changed(self) -> list[str]:
        """Names of what is not as it was."""
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
    """The optimizer's state and parameter groups: which containers there are, what each holds, and which tensors.

    Containers and tensors keep their identity; what the tensors hold is for :class:`~.preserve.TensorContents`. Other
    values are deep copies; ``UsageError`` where there can be none. Attributes of the optimizer beside ``state`` and
    ``param_groups`` are not covered, nor is what goes with it: schedulers, gradient scalers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str] | None = None) -> None:
        self._names = names or {}
        self._containers: dict[int, tuple[str, Any, Any]] = {}
        self.tensors: list[NamedTensor] = []
        """All of them, parameters apart."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._names.setdefault(parameter, f"parameter {len(self._names)} of the optimizer")
        try:
            self._keep(optimizer.state, "optimizer state")
            self._keep(optimizer.param_groups, "optimizer group")
        except Exception as error:  # whatever copying a user's object raises
            raise UsageError(
                "optimizer: expected state and groups that can be copied, to be restored after the profile, found "
                f"{type(error).__name__} ({first_line(error)}); leave what cannot be copied out of them"
            ) from error

    @property
    def parameters(self) -> list[NamedTensor]:
        """Those named by the caller, and all others of the optimizer."""
        return [(name, parameter) for parameter, name in self._names.items()]

    def actions(self) -> Iterator[Action]:
        for name, container, content in self._containers.values():
            yield name, lambda container=container, content=content: _refill(container, content)  # type: ignore[misc]

    def changed(self) -> list[str]:
        return [name for name, container, content in self._containers.values() if not _same(container, content)]

    def _keep(self, value: Any, path: str) -> Any:
        """``value`` itself where it is to be back itself, a copy otherwise."""
        if isinstance(value, torch.Tensor):
            if value not in self._names:
                self.tensors.append((path, value))
            return value
        if isinstance(value, dict | list):
            if id(value) not in self._containers:
                self._containers[id(value)] = path, value, None  # known, should it hold itself
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
    """Whether both hold the very same things in the same order."""
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
    """Of each module its parameters, buffers and submodules, as objects under their names, its class (which a
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
    if module.training != kept.training:  # assigned to a compiled module, it is a reason to compile again
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
    """Which tensor is each parameter's gradient, and whether it takes one; what it holds is not covered."""

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

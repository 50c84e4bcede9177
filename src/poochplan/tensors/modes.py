"""Dispatch modes that can be switched on and off in the middle of a step, and kept away from compiled callables."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .torch_private import TorchDispatchMode, call_attribute, in_backward, is_compiled, mode_stack


class ToggledMode(TorchDispatchMode):
    """A dispatch mode that is pushed and removed by calls, from inside hooks, in any order.

    States: *off* (not on the stack), *on*, and *muted* (on the stack, to be passed through). Both calls are idempotent.
    Muted because autograd runs each node of backward under the stack that it found when backward began: what is taken
    off in between comes back. Subclasses ask :attr:`is_on` in their ``__torch_dispatch__``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pushed = False
        self._muted = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise the first call of a compiled callable under this mode leaves it uncompiled for good (torch >= 2.9).
        return True

    @property
    def is_on(self) -> bool:
        return self._pushed and not self._muted

    def switch_on(self) -> None:
        """Pushes the mode on the calling thread's stack; takes effect from the next op (or the rest of this one)."""
        self._muted = False
        if not self._pushed or self not in mode_stack():
            self._pushed = True
            TorchDispatchMode.__enter__(self)

    def switch_off(self) -> None:
        """Takes the mode off the calling thread's stack, wherever in it other people's modes have left it."""
        if not self._pushed:
            return
        stack = mode_stack()
        if in_backward() or self not in stack:
            self._muted = True
            return
        self._pushed = False
        above = stack[stack.index(self) + 1 :]
        # The base class's methods, so that nobody's own __enter__ or __exit__ runs twice.
        for mode in reversed(above):
            TorchDispatchMode.__exit__(mode, None, None, None)
        TorchDispatchMode.__exit__(self, None, None, None)
        for mode in above:
            TorchDispatchMode.__enter__(mode)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Off for the length of a block, then as it was."""
        was_on = self.is_on
        self.switch_off()
        try:
            yield
        finally:
            if was_on:
                self.switch_on()


def uncompiled_hooks(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> torch.autograd.graph.saved_tensors_hooks:
    """Saved-tensors hooks that the compiler does not look into when a compiled region calls them."""
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
        pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def compiled_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules of ``model`` that ``torch.compile`` has wrapped (either way of calling it), by path."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if is_compiled(module) and not inside(name, found):
            found[name] = module
    return found


def inside(name: str, roots: dict[str, torch.nn.Module]) -> bool:
    """Whether the module path ``name`` is one of ``roots`` or lies below one."""
    return any(root in ("", name) or name.startswith(root + ".") for root in roots)


@contextlib.contextmanager
def around_compiled(
    model: torch.nn.Module, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Puts ``wrap(path, call)`` in the place of each compiled callable of ``model`` for the length of a block.

    No hook is put on a compiled module: a hook is part of what was compiled, and adding one compiles again.
    """
    undo: list[Callable[[], None]] = []
    try:
        for name, module in compiled_modules(model).items():
            attribute = call_attribute(module)
            original = getattr(module, attribute)
            undo.append(functools.partial(_restore, module, attribute, module.__dict__.get(attribute)))
            object.__setattr__(module, attribute, wrap(name, original))
        yield
    finally:
        for step in reversed(undo):
            step()


@contextlib.contextmanager
def before_forward(model: torch.nn.Module, tell: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Calls ``tell(args, kwargs)`` before each call of ``model`` for the length of a block.

    By a hook; where the model itself is compiled, around its callable. Entered after another :func:`around_compiled`
    it is told first.
    """
    if "" in compiled_modules(model):

        def wrap(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def told(*args: Any, **kwargs: Any) -> Any:
                tell(args, kwargs)
                return call(*args, **kwargs)

            return told

        with around_compiled(model, wrap):
            yield
        return

    def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        tell(args, kwargs)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _restore(module: torch.nn.Module, attribute: str, original: Any) -> None:
    if original is None:
        module.__dict__.pop(attribute, None)
    else:
        object.__setattr__(module, attribute, original)

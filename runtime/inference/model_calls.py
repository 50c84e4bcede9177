"""Calls of a model as they begin and end, and calls of its parts on the way, for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from poochplan.errors import UsageError
from poochplan.tensors.modes import around_compiled, compiled_modules, inside, left_out_of_copies

Begins = Callable[[tuple[Any, ...], dict[str, Any]], None]
Ends = Callable[[Any], None]


@contextmanager
def around_calls(model: torch.nn.Module, begins: Begins, ends: Ends) -> Iterator[None]:
    """Calls ``begins(args, kwargs)`` before each call of ``model`` and ``ends(result)`` behind it, for the length of a
    block; the result is None where the call has raised.

    By hooks; where the model itself is compiled, around its callable. Torch tells no hook of an interrupt, so a call
    may begin that never ends. Copies and pickles of the model have no part in it.

    Raises
    ------
    UsageError
        The model is of a kind whose kernels are others where there are hooks.
    """
    if isinstance(model, torch.nn.TransformerEncoderLayer):
        raise UsageError(
            "model: expected one whose ops are the same with hooks, found torch.nn.TransformerEncoderLayer, "
            "which then leaves its fast path; give the module that it is a part of, or torch.nn.Sequential(layer)"
        )
    if "" in compiled_modules(model):
        with around_compiled(model, lambda _, call: _told(call, begins, ends)):
            yield
        return

    def before(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        begins(args, kwargs)

    def behind(_: torch.nn.Module, __: Any, result: Any) -> None:
        ends(result)

    with (
        left_out_of_copies(model.register_forward_pre_hook(before, with_kwargs=True)),
        left_out_of_copies(model.register_forward_hook(behind, always_call=True)),
    ):
        yield


def _told(call: Callable[..., Any], begins: Begins, ends: Ends) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        result = None
        begins(args, kwargs)
        try:
            result = call(*args, **kwargs)
        finally:
            ends(result)
        return result

    return told


@contextmanager
def around_parts(model: torch.nn.Module, called: Callable[[str], None]) -> Iterator[None]:
    """Calls ``called(path)`` before each call of a larger part of ``model``, for the length of a block: of its own
    parts, and of those that have parts themselves.

    None of what is compiled, or of TorchScript. None of the layers of torch's transformer either: with hooks they leave
    their fast path, and so give other bits.
    """

    def telling(path: str) -> Callable[[torch.nn.Module, Any], None]:
        return lambda _, __: called(path)

    with ExitStack() as stack:
        for path, part in _larger_parts(model).items():
            stack.enter_context(left_out_of_copies(part.register_forward_pre_hook(telling(path))))
        yield


def _larger_parts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    closed = compiled_modules(model)
    found: dict[str, torch.nn.Module] = {}
    for path, part in model.named_modules():
        if inside(path, closed):
            continue
        if isinstance(part, torch.nn.TransformerEncoderLayer | torch.jit.ScriptModule):
            closed[path] = part
        elif path and ("." not in path or next(part.children(), None) is not None):
            found[path] = part
    return found

"""Actions that a step may not take in forward: run backward, take gradients, step the optimizer. They are reported.

Every way to run autograd from Python goes through one function of torch, even if no hook sees the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poochplan.errors import StepError
from poochplan.tensors.modes import around_calls, around_optimizer_steps
from poochplan.tensors.signatures import tensor_leaves
from poochplan.tensors.storages import gradient_of, stands_for_memory
from poochplan.torch_private.compiler_internals import is_tracing
from poochplan.torch_private.tensor_internals import FakeTensor, FunctionalTensor, intercept_autograd

CALLS_BACKWARD = "step(): expected forward only, found that it calls backward; return the loss instead"
TAKES_GRADIENTS = (
    "step(): expected forward only, found that it calls torch.autograd.grad or torch.func; return the loss instead, "
    "and leave gradients of gradients (as in a gradient penalty) out of the profiled step: no plan describes them"
)
STEPS_OPTIMIZER = (
    "step(): expected forward only, found that it steps the optimizer; return the loss, and pass the optimizer "
    "as optimizer="
)


@contextlib.contextmanager
def forward_only(model: torch.nn.Module) -> Iterator[None]:
    """Raises ``StepError`` if the block runs backward, takes gradients or steps an optimizer of the model."""

    def refusing(run: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_the_compilers(outputs):
                raise StepError(CALLS_BACKWARD if kwargs.get("accumulate_grad") else TAKES_GRADIENTS)
            return run(outputs, *args, **kwargs)

        return refuse

    def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
        raise StepError(STEPS_OPTIMIZER)

    try:
        with around_optimizer_steps(model, refuse_optimizer, lambda _: None), intercept_autograd(refusing):
            yield
    except RuntimeError as error:
        if "support saved tensor hooks" in str(error):  # torch.func, before it gets so far
            raise StepError(TAKES_GRADIENTS) from error
        raise


def is_the_compilers(outputs: Any) -> bool:
    """Whether the compiler runs this backward: it traces one while it compiles forward."""
    traced = all(isinstance(x, (FunctionalTensor, FakeTensor)) and not stands_for_memory(x) for x in outputs)
    return traced or is_tracing()


@contextlib.contextmanager
def inputs_explained(model: torch.nn.Module) -> Iterator[None]:
    """One clear line for a failure in the block because an input of the model is on another device than the model.

    An input elsewhere is no error in itself: the model may move it.
    """
    where = next(model.parameters()).device
    elsewhere: list[str] = []

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = (*tensor_leaves("", args), *tensor_leaves("", kwargs))
        elsewhere.extend(f"{path} on {leaf.device}" for path, leaf in leaves if leaf.device != where)

    with around_calls(model, note):
        try:
            yield
        except RuntimeError as error:
            told = any(word in str(error) for word in ("device", "meta"))
            if not elsewhere or not told or isinstance(error, torch.OutOfMemoryError):
                raise
            raise StepError(
                f"step(): expected the model's inputs on {where}, where its parameters are, found input "
                f"{elsewhere[0]}, and the step failed ({type(error).__name__}); move the data to {where}"
            ) from error


def checked_loss(loss: Any, model: torch.nn.Module) -> torch.Tensor:
    """What ``step()`` returned, if backward can start from it; raises ``StepError`` otherwise."""
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"step(): expected the scalar loss, a tensor, found {type(loss).__name__}; return the loss")
    if loss.is_nested or loss.layout is not torch.strided:
        kind = "nested" if loss.is_nested else str(loss.layout).removeprefix("torch.")
        raise StepError(f"step(): expected a scalar loss, found a {kind} tensor; reduce its values, as with .mean()")
    if loss.numel() != 1:
        raise StepError(f"step(): expected a scalar loss, found shape {list(loss.shape)}; reduce it, as with .mean()")
    if not loss.requires_grad:
        raise StepError(
            "step(): expected a loss that requires gradients, found one that does not; "
            "it must come from the model, outside torch.no_grad"
        )
    where = next(model.parameters()).device
    if loss.device.type not in ("cpu", where.type):
        raise StepError(
            f"step(): expected a loss on {where}, where the model is, found one on {loss.device}; compute it there"
        )
    return loss


def check_real(loss: torch.Tensor | None) -> None:
    """Raises ``StepError`` if a step with data returned a loss without data: it keeps a tensor outside the model."""
    if loss is not None and stands_for_memory(loss):
        raise StepError(
            "step(): expected a loss with data, found that it uses a tensor of a step without memory, which it kept "
            'outside the model; keep it in the model, or profile in mode "run" or "swap-all" in a new process'
        )


def check_trains(model: torch.nn.Module, leaves: set[torch.Tensor]) -> None:
    """Raises ``StepError`` if the step trains nothing of the model. After backward; ``leaves`` are the loss's.

    Gradients alone do not show this, because hooks may have used them up. Nor do the leaves, which a checkpoint hides.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if leaves.isdisjoint(parameters) and all(gradient_of(parameter) is None for parameter in parameters):
        raise StepError(
            "step(): expected a loss that depends on the model's parameters, found one that gives none of them a "
            "gradient; compute it with the model that is profiled"
        )

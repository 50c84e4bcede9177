"""Leaves the user's model, optimizer and generators as they were before the profile: all of it, or an error that says
what is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from poochplan.errors import StepError, UsageError
from poochplan.torch_private.tensor_internals import owned_buffers, owned_parameters

from .contents import TensorContents
from .states import Action, GeneratorStates, GradientStates, ModuleStates, OptimizerState, State, first_line

_NAMED_IN_MESSAGE = 3


@contextlib.contextmanager
def preserved(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restores, after the block and on every path out of it: parameters, gradients, buffers, modules and their training
    flags, optimizer state and groups, and generators (see ``states.py`` for what is not covered). Tensors keep their
    identity and storage. What they held is kept in host memory, so that the device holds what it holds in training; it
    and a checksum before and after take about as long as reading it four times, some 2 s for 1 GB.

    Raises
    ------
    UsageError
        Before the block: something in the model or the optimizer could not be restored.
    StepError
        After it: something is not as it was. All that could be restored is.
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
    # In this order: a gradient fits a parameter whose tensor is back.
    return [ModuleStates(model), contents, gradients, *optimizers, GeneratorStates(model)]


def check_restorable(model: torch.nn.Module) -> None:
    """Raises ``UsageError`` for a model with modules or parameters that nothing could put back as they were."""
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
    """Puts the states back after the block, on every path out of it; raises ``StepError`` where one is not back."""
    try:
        yield
    finally:
        restore(states)


def restore(states: Sequence[State]) -> None:
    """Attempts every action of every state, then asks each what is not as it was. An interrupt meanwhile waits."""
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
    """Runs it to its end; notes under its name why it failed."""
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

"""The training loop of random programs: plain steps and all others, and what is compared after each."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from poochplan.errors import SpillError
from poochplan.runtime.metering.allocated import aside
from poochplan.runtime.metering.census import leave_out

from .drawing import PLAIN
from .network import AskedTo, Running

WRITES, WRITTEN = "a saved tensor written", "modified by an inplace operation"
REPLAYED = "it is to be recomputed"
MOST_LOST = 4
Snapshot = dict[str, torch.Tensor | None]
AfterStep = Callable[[int, str], None]


def train(running: Running, after_step: AfterStep = lambda index, event: None) -> list[Snapshot]:
    """What :func:`snapshot` says after each step."""
    torch.manual_seed(running.program.seed + 1)
    seen = []
    for index, event in enumerate(running.program.events):
        _one_step(running, event)
        seen.append(snapshot(running))
        after_step(index, event)
        running.next_batch()
    return seen


def _one_step(running: Running, event: str) -> None:
    running.optimizer.zero_grad(set_to_none=True)
    usual = running.autocast, running.keeps_state, running.model.order
    try:
        _forward_and_backward(running, event)
        running.optimizer.step()
    except (AskedTo, RuntimeError) as error:
        if not isinstance(error, AskedTo) and not (event == WRITES and WRITTEN in str(error)):
            raise
        if REPLAYED in str(error):  # noticed by a replay, at another node than in-core: what is done by then differs
            raise
        running.loss = None
    finally:
        running.autocast, running.keeps_state, running.model.order = usual
        running.model.fails_at = running.model.gradient_fails_at = None
        running.losses, running.hidden, running.holds_hidden = [], None, False
        if event != PLAIN:
            gc.collect()  # what an exception has left in a cycle is no part of the next step


def _forward_and_backward(running: Running, event: str) -> None:
    running.announce()
    _make_ready(running, event)
    hooks = []
    if event == "forward hook raises":
        hooks.append(running.model.blocks[-1].register_forward_hook(_raise))
    try:
        loss = running.loss = running.step()  # that of the step before goes now, as in most loops
    finally:
        for hook in hooks:
            hook.remove()
    if event == WRITES and running.hidden is not None:
        with torch.no_grad():
            running.hidden.mul_(2)
    elif event == "two steps at once":
        running.announce()
        running.step().backward()  # type: ignore[no-untyped-call]
    if event == "two backwards":
        first = running.losses[0] if len(running.losses) > 1 else loss
        first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        running.losses[-1].backward()  # type: ignore[no-untyped-call]
    elif event == "backward inside autocast":
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()  # type: ignore[no-untyped-call]
    elif event != "no backward":
        loss.backward()  # type: ignore[no-untyped-call]
    running.loss = loss.detach()


def _make_ready(running: Running, event: str) -> None:
    """What is other than in a plain step, before its forward."""
    model, rows = running.model, running.program.rows
    middle = len(model.blocks) // 2
    if event == "forward raises":
        model.fails_at = middle
    elif event == "backward hook raises":
        model.gradient_fails_at = middle
    elif event == WRITES:
        running.holds_hidden = not running.autocast  # under it a copy is saved
    elif event in ("smaller batch", "larger batch"):
        running.keeps_state = False
        running.batch = [
            part.repeat(2, 1)[: rows - 2 if event == "smaller batch" else rows + 5] for part in running.batch
        ]
    elif event == "a block left out":
        model.order = [index for index in model.order if index != middle]
    elif event == "a block twice":
        model.order = [*range(middle + 1), *range(middle, len(model.blocks))]
    elif event == "a forward thrown away":
        model(running.batch[0])
    elif event == "an evaluation between":
        with torch.no_grad():
            model.eval()(running.batch[0])
        model.train()
    elif event == "autocast switched":
        running.autocast = not running.autocast


def _raise(*_: object) -> None:
    raise AskedTo("in a hook of forward")


def first_step(running: Running) -> list[Snapshot]:
    """The first step, its backward again where a value was lost: without checkpoints that gives the same."""
    torch.manual_seed(running.program.seed + 1)
    loss = running.loss = running.step()
    for _ in range(MOST_LOST):
        running.optimizer.zero_grad(set_to_none=True)
        try:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            break
        except SpillError:
            continue
    running.optimizer.step()
    return [snapshot(running)]


def snapshot(running: Running) -> Snapshot:
    """Copies of the loss, every gradient, parameter, buffer, kept state and generator. No meter sees them."""
    with _disable_current_modes(), aside():
        model = running.model
        found: Snapshot = {"loss": running.loss, "state": running.state, "generator": torch.get_rng_state()}
        found |= {f"parameter {name}": parameter.data for name, parameter in model.named_parameters()}
        found |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
        found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        for name, module in model.named_modules():
            if isinstance(getattr(module, "generator", None), torch.Generator):
                found[f"generator {name}"] = module.generator.get_state()
        copies = {name: None if tensor is None else tensor.detach().clone() for name, tensor in found.items()}
        leave_out(copy for copy in copies.values() if copy is not None)
        return copies


def differences(wanted: list[Snapshot], found: list[Snapshot]) -> list[str]:
    """What differs bitwise in the first step in which anything does: the first tensor of each kind."""
    for step, (left, right) in enumerate(zip(wanted, found, strict=True)):
        names = [name for name in left if not _same(left[name], right[name])]
        first = {name.split()[0]: name for name in reversed(names)}
        if first:
            return [f"{name} is not as in-core from step {step} on" for name in first.values()]
    return []


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)

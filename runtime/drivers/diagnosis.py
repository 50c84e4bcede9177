"""Diagnosis: what of a step has changed since its profile, and what to do about it, in words for its user."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from poochplan.formats.plan import PlannedValue
from poochplan.formats.plan_set import Signature, describe
from poochplan.runtime.engine.cursor import Segment

_ENTRY = re.compile(r"(?P<path>.*) (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]", re.DOTALL)
AGAIN = "make a new profile and plan for it"
FOR_EACH_SHAPE = "for steps of several shapes make a plan for each: poochplan.plan_set(step_for, shapes=[...])"


class Expected(NamedTuple):
    """What is known of the planned step beside its instructions."""

    inputs: Signature = ()
    """That the model is called with; empty where any will do, or none is known."""
    model: torch.nn.Module | None = None


UNKNOWN = Expected()


class Found(NamedTuple):
    """Where the step differs: the planned value there, and the dtype of what came in its place."""

    planned: PlannedValue | None
    """None behind the last one."""
    dtype: str = ""
    """Empty where it was no save that came."""
    layers_to_come: bool = False
    """Whether layers are planned to save something from here on."""
    in_backward: bool = False
    """Whether the saves were as planned, and the order of their uses is not."""


def what_changed(segment: Segment, expected: Expected, found: Found) -> str:
    """Why the step of this segment is not the planned one, and what to do: the first cause that would do it."""
    return (
        _of_inputs(segment.inputs or (), expected.inputs)
        or _of_mode(expected.model)
        or _of_calls(segment)
        or _of_place(segment, expected.model, found)
    )


def _of_inputs(found: Signature, planned: Signature) -> str:
    if not found or not planned or sorted(found) == sorted(planned):
        return ""
    mine, theirs = _by_path(found), _by_path(planned)
    if mine.keys() != theirs.keys():
        return f"the model is called with {describe(found)}, planned {describe(planned)}; {AGAIN}"
    path = next(path for path in theirs if mine[path] != theirs[path])
    (dtype, shape), (planned_dtype, planned_shape) = mine[path], theirs[path]
    if dtype != planned_dtype:
        return f"input {path} is {dtype}, planned {planned_dtype}; {AGAIN}"
    if len(shape) != len(planned_shape):
        return f"input {path} has shape {list(shape)}, planned {list(planned_shape)}; {AGAIN}"
    axis = next(axis for axis, size in enumerate(shape) if size != planned_shape[axis])
    what = "another batch size" if axis == 0 else "another shape"
    return f"{what}, input {path} is {list(shape)}, planned {list(planned_shape)}; {FOR_EACH_SHAPE}"


def _by_path(signature: Signature) -> dict[str, tuple[str, tuple[int, ...]]]:
    matches = filter(None, map(_ENTRY.fullmatch, signature))
    return {
        match["path"]: (match["dtype"], tuple(int(size) for size in match["shape"].split(",") if size.strip()))
        for match in matches
    }


def _of_mode(model: torch.nn.Module | None) -> str:
    if model is None or model.training:
        return ""
    return "the model is in eval mode; call model.train() before the step, and evaluate under torch.no_grad()"


def _of_calls(segment: Segment) -> str:
    if segment.calls > 1 and not segment.used:
        return (
            "the model was called again while the output of its call before is held; let go of that output (keep "
            "loss.detach(), or call it under torch.no_grad()), or say where steps begin with session.step()"
        )
    return ""


def _of_place(segment: Segment, model: torch.nn.Module | None, found: Found) -> str:
    planned = found.planned
    if found.in_backward:
        return (
            "backward goes another way than when it was profiled, as where only a part of the loss is used, a loss is "
            f"kept and used again, or a hook takes gradients; {AGAIN}"
        )
    if found.layers_to_come and (planned is None or not planned.layer):
        return (
            "the model's forward goes another way than when it was profiled (a layer left out, run twice or replaced, "
            f"another branch); {AGAIN}"
        )
    if planned is None or not planned.layer:
        return (
            "what comes behind the model's layers is not as profiled, as with another loss function or one more term "
            f"of it; {AGAIN}"
        )
    if model is not None and planned.layer not in dict(model.named_modules()):
        return f"there is no layer {planned.layer} in the model any more; {AGAIN}"
    if found.dtype and found.dtype != planned.dtype:
        return f"another precision, {found.dtype} in place of {planned.dtype}; profile under the same autocast"
    if segment.left_over_bytes:
        return (
            f"an earlier step's loss or output is kept ({segment.left_over_bytes} bytes), or layer {planned.layer} "
            f"runs another way; keep loss.detach() or loss.item(), or {AGAIN}"
        )
    return (
        f"layer {planned.layer} was replaced, left out or runs another way than when it was profiled (a branch, its "
        f"settings); {AGAIN}"
    )

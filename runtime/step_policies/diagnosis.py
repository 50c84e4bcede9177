"""Diagnosis: where a step diverged from its instructions, what has changed since its profile, and what to do."""

from __future__ import annotations

from itertools import zip_longest
from typing import Literal, NamedTuple, TypeVar

import torch

from poochplan.formats.plan import Departure, Instructions, PlannedValue
from poochplan.formats.plan_set import Signature, describe, entry_of
from poochplan.runtime.engine.cursor import Segment
from poochplan.tensors.signatures import model_tensors, passing_buffers
from poochplan.tensors.storages import has_storage, storage_key
from poochplan.torch_private.tensor_internals import is_training, owned_parameters, running_modules

SAFELY = "the rest of this step swaps every saved value: slower, perhaps above the budget; its gradients are right"
KEPT = "values saved before the model is called are kept, and the call begins a step"
CANNOT_WRITE = (
    "swapped values stay on the device, and steps may exceed the budget: they cannot be written ({}); free disk space "
    "or host memory, or name another spill_dir"
)
AGAIN = "make a new profile and plan for it"
FOR_EACH_SHAPE = "for steps of several shapes make a plan for each: poochplan.plan_set(step_for, shapes=[...])"


class Difference(NamedTuple):
    """A difference of the step from its instructions."""

    reason: str
    """In words, for the reader of a message."""
    departure: Departure
    planned: PlannedValue | None
    """The value planned there; None after the last one."""
    layers_to_come: bool
    """Whether later layers are planned to save something."""
    dtype: str = ""
    """Of the tensor found instead; empty if it was not a save."""
    storage: int = -1
    """The identity of that tensor's storage; -1 if it was not a save."""
    in_backward: bool = False
    """Whether the saves were as planned, but not the order of their uses."""


def what_changed(
    segment: Segment,
    inputs: Signature,
    model: torch.nn.Module | None,
    found: Difference,
    tensors: tuple[str, ...] = (),
) -> str:
    """Why this segment's step is not the planned one, which has these inputs, and a model of these tensors, and what to
    do: the first cause that explains it.
    """
    if other_inputs := _of_inputs(segment.inputs or (), inputs):
        return other_inputs
    if model is not None and not is_training(model):
        return "the model is in eval mode; call model.train() before the step, and evaluate under torch.no_grad()"
    if segment.calls > 1 and not segment.used:
        return (
            "the model was called again while the output of its call before is held; let go of that output (keep "
            "loss.detach(), or call it under torch.no_grad()), or say where steps begin with session.step()"
        )
    return _of_parameters(model, found, tensors) or _of_place(segment, model, found)


def _of_parameters(model: torch.nn.Module | None, found: Difference, planned: tuple[str, ...]) -> str:
    if model is None:
        return ""
    mine, passing = model_tensors(model) if planned else (), passing_buffers(model)
    lasting = ([line for line in lines if line.partition(" ")[0] not in passing] for lines in (planned, mine))
    other = next((pair for pair in zip_longest(*lasting) if pair[0] != pair[1]), None)
    if other is not None:
        wanted, seen = (one or "nothing more" for one in other)
        return f"the model has other parameters than when it was profiled: planned {wanted}, found {seen}; {AGAIN}"
    layer, module = running_layer(model)
    for name, own in ({} if module is None else owned_parameters(module)).items():
        if own is not None and has_storage(own, own.device.type) and storage_key(own) == found.storage:
            return (
                f"another tensor stands for parameter {f'{layer}.{name}' if layer else name} than when the step began "
                f"(torch.func.functional_call, an assignment in forward); {AGAIN}"
            )
    return ""


def running_layer(model: torch.nn.Module) -> tuple[str, torch.nn.Module | None]:
    """The innermost module of the model that this thread is in a call of, with its path; None if there is none."""
    paths = {id(module): path for path, module in model.named_modules()}
    return next(((paths[id(one)], one) for one in running_modules() if id(one) in paths), ("", None))


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
    return {one.path: (one.dtype, one.shape) for one in map(entry_of, signature) if one is not None}


def _of_place(segment: Segment, model: torch.nn.Module | None, found: Difference) -> str:
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
    layer, module = ("", None) if model is None else running_layer(model)
    if (planned is None or not planned.layer) and module is not None and found.storage != -1:
        return (
            f"{f'layer {layer}' if layer else 'the model itself'} saves more than when it was profiled (it was "
            f"replaced, runs another way or once more, or computes from other tensors than its parameters); {AGAIN}"
        )
    if planned is None or not planned.layer:
        return (
            "the code after the model's layers is not the profiled one, for example with another loss function or one "
            f"more term; {AGAIN}"
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


# -- where a step differs --------------------------------------------------------------------------------------------

NOTHING_PLANNED = "nothing"
T = TypeVar("T")


def differs_at_save(instructions: Instructions, index: int, tensor: torch.Tensor, *, exact: bool) -> Difference:
    """The tensor is not the one planned for this save point."""
    value, found = _at(instructions.values, index), _found(tensor)
    reason = _beyond(instructions, found) if value is None else _instead(value, found, exact=exact)
    return Difference(
        reason,
        _departure("save", index, value, _described(value), found),
        value,
        _layers_from(instructions, index),
        str(tensor.dtype).removeprefix("torch."),
        storage_key(tensor),
    )


def differs_at_pack(
    instructions: Instructions, ordinal: int, index: int | None, tensor: torch.Tensor, *, exact: bool
) -> Difference:
    """Handle ``ordinal`` is not of the planned value, but of save point ``index`` (None: of no save point)."""
    planned, found = _at(instructions.handles, ordinal), _found(tensor)
    of = "no save point" if index is None else f"save point {index}, {{}}"
    came = None if index is None else instructions.values[index]
    value = None if planned is None else instructions.values[planned]
    if value is None:
        reason = _beyond(instructions, found)
    else:
        also = f" of save point {planned}"
        reason = _instead(value, f"{found} of {of.format(_placed(came))}", also, exact=exact)
    return Difference(
        reason,
        _departure("pack", ordinal, value, _described(value), f"{found} of {of.format(_name(came))}"),
        value,
        _layers_from(instructions, len(instructions.values) if planned is None else planned),
    )


def differs_at_use(instructions: Instructions, number: int, ordinal: int, saves: int, *, exact: bool) -> Difference:
    """Backward uses handle ``ordinal``, after ``saves`` save points, but another use or save was planned."""
    found = f"{_name(_of_handle(instructions, ordinal))} by handle {ordinal}"
    by_handle = _by_handle(instructions, ordinal)
    value, to_come = _at(instructions.values, saves), _layers_from(instructions, saves)
    if value is not None:
        reason = _instead(value, f"that backward has begun, with {by_handle}", exact=exact)
        departure = _departure("save", saves, value, _described(value), f"backward, which begins with {found}")
        return Difference(reason, departure, value, to_come)
    planned = _at(instructions.uses, number)
    wanted = None if planned is None else _of_handle(instructions, planned)
    told, said = NOTHING_PLANNED, "its end"
    if planned is not None:
        told, said = f"{_name(wanted)} by handle {planned}", _by_handle(instructions, planned)
    departure = _departure("use", number, wanted, told, found)
    return Difference(f"backward: planned {said}, found {by_handle}", departure, None, to_come, in_backward=True)


def _departure(
    at: Literal["save", "pack", "use"], index: int, value: PlannedValue | None, planned: str, found: str
) -> Departure:
    layer, name = ("", "") if value is None else (value.layer, value.name)
    return Departure(at=at, index=index, layer=layer, value=name, planned=planned, found=found)


def _instead(value: PlannedValue, found: str, also: str = "", *, exact: bool) -> str:
    return f"{_placed(value)}: planned {'' if exact else 'at most '}{_described(value)}{also}, found {found}"


def _beyond(instructions: Instructions, found: str) -> str:
    last = f"what comes after {_placed(instructions.values[-1])}" if instructions.values else "its start"
    return f"{last}: planned backward, found that {found} is saved"


def _layers_from(instructions: Instructions, index: int) -> bool:
    """Whether a layer of the model saves a value from this save point on."""
    return any(value.layer for value in instructions.values[index:])


def _by_handle(instructions: Instructions, ordinal: int) -> str:
    value = _of_handle(instructions, ordinal)
    if value is None:
        return "nothing that was planned"
    return f"{_placed(value)} {value.dtype}{list(value.shape)} by handle {ordinal}"


def _of_handle(instructions: Instructions, ordinal: int) -> PlannedValue | None:
    index = _at(instructions.handles, ordinal)
    return None if index is None else instructions.values[index]


def _at(entries: tuple[T, ...], index: int) -> T | None:
    return entries[index] if index < len(entries) else None


def _described(value: PlannedValue | None) -> str:
    return NOTHING_PLANNED if value is None else f"{value.dtype}{list(value.shape)} of {value.size_bytes} bytes"


def _found(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} of {tensor.untyped_storage().nbytes()} bytes"


def _name(value: PlannedValue | None) -> str:
    return NOTHING_PLANNED if value is None else value.name


def _placed(value: PlannedValue | None) -> str:
    """A value with its layer, for the reader of a message."""
    if value is None:
        return NOTHING_PLANNED
    where = f"(layer {value.layer})" if value.layer else "(of no layer)"
    what = value.name.rpartition("/")[2].partition("#")[0]
    if value.name.startswith("before/"):
        return f"what was there before the step, as {what} {where}"
    return f"{value.name if value.layer else what} {where}"

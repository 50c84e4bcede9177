"""What a call of an operator writes: one answer for the capture and the recorder, on whose agreeing exactness rests."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch

from poochplan.torch_private.tensor_internals import covers_itself_once

from .arguments import outputs_of
from .operators import Traits, is_chosen_by_timing
from .storages import is_plain, storage_key

CUDNN_RNN, CUDNN_RNN_DROPOUT, CUDNN_RNN_TRAIN = "aten._cudnn_rnn.default", 11, 12
"""The operator, and the positions of two of its arguments; its last is the state of its generator."""


class Writes(NamedTuple):
    """What a call writes of what was there before."""

    in_place: list[torch.Tensor]
    """The arguments whose contents are others afterwards, and stay so when the call is replayed."""
    scratch: dict[int, torch.Tensor]
    """Running statistics by argument position: a replay gives the call throw-away tensors in their place, so that the
    model's own are no part of ``in_place``."""
    overwritten: torch.Tensor | None
    """The argument of which every byte of the storage is written and none is read."""
    repeatable: bool
    """Whether it can be run again: the operator does what its schema says, by the same algorithm on any thread, and
    the statistics are buffers of the model's."""


def writes_of(
    facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], *, static: Container[int], device_type: str
) -> Writes:
    """What the call writes; asked before it runs. ``static``: storage keys of the model's parameters and buffers."""
    scratch = _statistics(facts, args)
    foreign = [tensor for tensor in scratch.values() if storage_key(tensor) not in static]
    declared = [x for x in _declared(facts, args, kwargs) if not any(x is one for one in scratch.values())]
    target = args[0] if facts.overwriting else None
    whole = isinstance(target, torch.Tensor) and is_plain(target, device_type) and covers_storage(target)
    return Writes(
        in_place=[*declared, *foreign],
        scratch=scratch,
        overwritten=target if whole else None,
        repeatable=facts.trusted and not foreign and not is_chosen_by_timing(facts, device_type),
    )


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are all of its storage, each once."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and covers_itself_once(tensor)


def _statistics(facts: Traits, args: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """The running statistics that this call only writes, because it normalises by its batch; by argument position."""
    if not facts.statistics or (len(args) > 5 and args[5] is False):
        return {}
    return {position: args[position] for position in facts.statistics if isinstance(args[position], torch.Tensor)}


def _declared(facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the operator writes in place, by its schema."""
    if facts.name == CUDNN_RNN:  # does not declare that dropout between its layers moves a generator on
        drops = args[CUDNN_RNN_DROPOUT] > 0 and args[CUDNN_RNN_TRAIN]
        return [args[-1]] if drops and isinstance(args[-1], torch.Tensor) else []
    if not facts.written:
        return []
    candidates = [args[position] for position in facts.written if position < len(args)]
    candidates += [value for name, value in kwargs.items() if name in facts.written_names]
    return [leaf for leaf in outputs_of(tuple(candidates)) if isinstance(leaf, torch.Tensor)]

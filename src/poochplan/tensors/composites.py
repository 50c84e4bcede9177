"""Composite operators that take another way where there is a dispatch mode: they are held to the one they take without.

Otherwise a step that is looked at would save other tensors than one that is not, and leave its plan. ATen's
``ctc_loss`` is the only one: with a mode it hands lengths on as tensors, which are then saved.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from poochplan.torch_private.tensor_internals import cudnn_takes_ctc_loss, mode_stack

from .storages import is_plain

_CTC_LOSS = torch.ops.aten.ctc_loss


@functools.cache
def held_to_their_way() -> torch.library.Library | None:
    """From the first mode of this process on, which makes no difference as long as there is none; None on ROCm."""
    if torch.version.hip is not None:
        return None
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradCUDA"):
        library.impl("ctc_loss.Tensor", _ctc_loss, key)
    return library


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    *rest: Any,
) -> torch.Tensor:
    tensors = (log_probs, targets, input_lengths, target_lengths)
    modes = mode_stack()
    is_looked_at = bool(modes) and not any(mode.is_infra_mode() for mode in modes)  # which traces, or makes up data
    is_real = all(is_plain(tensor, tensor.device.type) for tensor in tensors)
    if not (is_looked_at and is_real) or _is_of_cudnn(*tensors, blank):
        found: torch.Tensor = _CTC_LOSS.Tensor.decompose(*tensors, blank, *rest)
        return found
    found = _CTC_LOSS.IntList(log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, *rest)
    return found


def _is_of_cudnn(log_probs: torch.Tensor, *others: Any) -> bool:
    """Whether cuDNN computes it, which takes tensors with and without a mode."""
    return log_probs.is_cuda and bool(cudnn_takes_ctc_loss(log_probs, *others))

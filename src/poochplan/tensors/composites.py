"""Composite operators that do not go with modes or hooks: they are held to what they do without.

With a mode ``ctc_loss`` hands lengths on as tensors, which are then saved: a step that is looked at would save other
tensors than one that is not, and leave its plan. ``rrelu`` saves its noise before that is drawn.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from poochplan.torch_private.tensor_internals import cudnn_takes_ctc_loss, mode_stack, topmost_hooks, version_of

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
        library.impl("rrelu", functools.partial(_rrelu, torch.ops.aten.rrelu.default), key)
        library.impl("rrelu_", functools.partial(_rrelu, torch.ops.aten.rrelu_.default), key)
    return library


def _rrelu(op: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """What it saves is kept where there are saved-tensors hooks: it saves its noise before the kernel has drawn that,
    and a hook that copies would have what was there before. Torch's database of operators has no other such op.
    """
    if topmost_hooks() is None or not is_plain(tensor, tensor.device.type):
        found: torch.Tensor = op.decompose(tensor, *rest)
        return found
    with torch.autograd.graph.saved_tensors_hooks(_Kept, _Kept.given_back):
        found = op.decompose(tensor, *rest)
    return found


class _Kept:
    """A saved tensor as it is; whoever writes it gets the error that autograd would raise."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), version_of(tensor)

    def given_back(self) -> torch.Tensor:
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: what "
                f"rrelu saved is at version {version_of(self._tensor)}, expected {self._version}"
            )
        return self._tensor


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

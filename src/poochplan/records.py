"""What a training step left behind, and the first tensor in which two runs differ.

Equality is exact: the bits of every tensor, so that -0.0 differs from 0.0 and a NaN equals the same NaN.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from poochplan.formats.run_record import StepDigests

Tensors = dict[str, torch.Tensor]
_KINDS = ("gradient", "buffer", "parameter", "generator")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StepRecord:
    """What a step left behind: copies, by name."""

    loss: torch.Tensor
    gradients: Tensors
    """Of every parameter that has one, before the optimizer's step."""
    buffers: Tensors
    parameters: Tensors
    """After the optimizer's step."""
    generators: Tensors = field(default_factory=dict)
    """States of torch's random number generators then, by kind of device."""

    def digests(self) -> StepDigests:
        """Of all of it."""
        kinds = {f"{kind}s": getattr(self, f"{kind}s") for kind in _KINDS}
        of_kinds = {kind: {name: _digest(one) for name, one in held.items()} for kind, held in kinds.items()}
        return StepDigests(loss=_digest(self.loss), **of_kinds)


def _digest(tensor: torch.Tensor) -> str:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    plain = dense.resolve_conj().resolve_neg().contiguous()
    total = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}".encode())
    if plain.numel():
        total.update(plain.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def first_difference(expected: list[StepRecord], found: list[StepRecord]) -> str | None:
    """Step, kind and name of the first tensor that is not bitwise equal, and by how much; None when all are."""
    if len(expected) != len(found):
        return f"{len(expected)} steps against {len(found)}"
    for step, (left, right) in enumerate(zip(expected, found, strict=True)):
        pairs = [("loss", {"": left.loss}, {"": right.loss})]
        pairs += [(kind, getattr(left, f"{kind}s"), getattr(right, f"{kind}s")) for kind in _KINDS]
        for kind, wanted, seen in pairs:
            for name in (*wanted, *(other for other in seen if other not in wanted)):
                detail = _difference(wanted.get(name), seen.get(name))
                if detail is not None:
                    return f"step {step}: {kind} {name}".rstrip() + f" differs: {detail}"
    return None


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two dense tensors have the same dtype, shape and bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.is_complex:
        return bitwise_equal(torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj()))
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    word = _WORDS[left.element_size()]
    return torch.equal(left.contiguous().view(word), right.contiguous().view(word))


def _difference(wanted: torch.Tensor | None, seen: torch.Tensor | None) -> str | None:
    if wanted is None or seen is None:
        return (
            "there in-core and missing under the plan" if seen is None else "missing in-core and there under the plan"
        )
    if bitwise_equal(wanted, seen):
        return None
    if wanted.shape != seen.shape or wanted.dtype != seen.dtype:
        return f"{wanted.dtype} {list(wanted.shape)} in-core, {seen.dtype} {list(seen.shape)} under the plan"
    apart = wanted.to(torch.complex128 if wanted.dtype.is_complex else torch.float64) - seen
    return f"{int((wanted != seen).sum())} of {wanted.numel()} elements, by up to {apart.abs().max().item():.3g}"

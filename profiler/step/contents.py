"""What tensors hold, kept in host memory and put back, with a checksum of every byte that tells whether it is back."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from poochplan.errors import UsageError
from poochplan.tensors.storages import is_made_of_parts, parts_of, storage_key
from poochplan.torch_private.tensor_internals import is_zero

from .states import Action, NamedTensor, first_line


class _Kept(NamedTuple):
    """One tensor. ``whole`` is a copy of a sparse or nested one, ``alias`` what any other one was a view of."""

    tensor: torch.Tensor
    whole: torch.Tensor | None
    alias: torch.Tensor | None
    checksum: tuple[Any, ...]


class TensorContents:
    """What the tensors hold and how each lies in its storage. They are kept storage by storage, each once: tied tensors
    share one, and elements of an expanded one overlap. Sparse and nested tensors are copied.

    Raises ``UsageError`` naming the first tensor that has nothing which could be kept.
    """

    def __init__(self, tensors: Iterable[NamedTensor]) -> None:
        self._saved: dict[int, tuple[str, torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._kept: dict[str, _Kept] = {}
        sums: dict[int, int] = {}
        for name, tensor in tensors:
            try:
                self._kept[name] = self._keep(name, tensor, sums)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                raise UsageError(
                    f"{name}: expected a tensor whose content can be kept and restored after the profile, found a "
                    f"{_kind(tensor)} ({first_line(error)}); give it data, or leave it out of what is profiled"
                ) from error

    def actions(self) -> Iterator[Action]:
        for name, kept in self._kept.items():
            yield name, lambda kept=kept: _put_back(kept)  # type: ignore[misc]
        for name, storage, saved in self._saved.values():
            yield name, lambda storage=storage, saved=saved: _write(storage, saved)  # type: ignore[misc]

    def changed(self) -> list[str]:
        sums: dict[int, int] = {}
        return [name for name, kept in self._kept.items() if _checksum(kept.tensor, sums) != kept.checksum]

    def _keep(self, name: str, tensor: torch.Tensor, sums: dict[int, int]) -> _Kept:
        if is_made_of_parts(tensor) and not hasattr(tensor, "__tensor_flatten__"):
            return _Kept(tensor, tensor.detach().to("cpu", copy=True), None, _checksum(tensor, sums))
        for part in parts_of(tensor):
            if is_zero(part):  # nothing can write it
                continue
            key = storage_key(part)
            if key not in self._saved:
                storage = part.untyped_storage()
                self._saved[key] = name, storage, _on_host(storage, copy=True)
        alias = None if is_made_of_parts(tensor) else tensor.data
        return _Kept(tensor, None, alias, _checksum(tensor, sums))


def _put_back(kept: _Kept) -> None:
    tensor, alias = kept.tensor, kept.alias
    if kept.whole is not None:
        if tensor.layout is torch.sparse_coo:
            tensor.data = kept.whole.to(tensor.device)  # copy_ gives it new parts, and its alias alone would have them
        else:
            tensor.data.copy_(kept.whole)
    elif alias is not None and _geometry(tensor) != _geometry(alias):
        tensor.data = alias


def _write(storage: torch.UntypedStorage, saved: torch.UntypedStorage) -> None:
    if storage.nbytes() != saved.nbytes():
        storage.resize_(saved.nbytes())
    storage.copy_(saved)


def _on_host(storage: torch.UntypedStorage, *, copy: bool) -> torch.UntypedStorage:
    if storage.device.type == "cpu":
        return storage.clone() if copy else storage
    if storage.device.type == "meta":
        raise ValueError("it has no memory")
    return storage.cpu()


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _checksum(tensor: torch.Tensor, sums: dict[int, int]) -> tuple[Any, ...]:
    """Of how it lies in its storages, and of their bytes; ``sums`` has those that were read already."""
    found: list[Any] = [type(tensor), tensor.shape, tensor.dtype]
    if is_made_of_parts(tensor):  # which may be made anew each time, and lie elsewhere
        found += [(part.shape, part.dtype, _crc(part.clone().untyped_storage())) for part in parts_of(tensor)]
        return tuple(found)
    key = storage_key(tensor)
    if key not in sums:
        sums[key] = 0 if is_zero(tensor) else _crc(tensor.untyped_storage())
    return (*found, _geometry(tensor), sums[key])


def _crc(storage: torch.UntypedStorage) -> int:
    # CRC-32: any change within 32 bits of each other is found for certain, others but for one in 4e9; at about 1 GB/s.
    held = _on_host(storage, copy=False)
    # At its address: an array of NumPy's would leave the user's storage one that cannot be resized.
    return zlib.crc32((ctypes.c_char * held.nbytes()).from_address(held.data_ptr())) if held.nbytes() else 0


def _kind(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of {str(tensor.layout).removeprefix('torch.')} layout on {tensor.device}"

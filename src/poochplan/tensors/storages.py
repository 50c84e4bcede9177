"""Storages and views: identities of values, geometries of views on them, and version counters without memory."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from poochplan.guard import users
from poochplan.torch_private.sharding import around_local_tensor, local_tensor, without_local_tensor
from poochplan.torch_private.tensor_internals import (
    COO_PARTS,
    FakeTensor,
    FakeTensorMode,
    detached_alias,
    dispatch_keys,
    is_zero,
    modules_of,
    owned_buffers,
    owned_parameters,
    storage_identity,
    version_of,
    without_modes,
    wraps_another,
)


class FakeMemory(FakeTensorMode):
    """The mode of a ``fake`` profile. Its tensors represent ordinary ones without taking memory.

    Fake tensors of other modes (the compiler's) count as a subclass, and are never touched.
    """

    def __init__(self, **options: Any) -> None:
        _autograd_starts()
        super().__init__(**options)


@functools.cache
def _autograd_starts() -> None:
    """Runs a first backward before fake tensors, if this torch was built for GPUs and none is here.

    Fake tensors then pretend that there are GPUs. In its first backward autograd starts a thread for each GPU, and no
    worker that is forked after that can compute gradients.
    """
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        with without_modes(), torch.inference_mode(False):
            torch.ones((), device="cpu", requires_grad=True).backward()


class Geometry(msgspec.Struct, frozen=True, gc=False):
    """The position of a tensor on its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a tensor. Equal ones are one object: a step asks for thousands, and few differ."""
        return geometry(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this geometry on ``storage``, detached from any graph. No memory is taken."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


geometry = functools.lru_cache(4096)(Geometry)


def new_storage(size_bytes: int, where: torch.device) -> torch.UntypedStorage:
    """A storage with undefined contents, which the caller overwrites completely.

    So it is not filled even if deterministic algorithms fill new memory (``torch.utils.deterministic``).
    """
    settings: Any = torch.utils.deterministic
    fills = torch.are_deterministic_algorithms_enabled() and settings.fill_uninitialized_memory
    if fills:
        settings.fill_uninitialized_memory = False
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=where).untyped_storage()
    finally:
        if fills:
            settings.fill_uninitialized_memory = True


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, as a tensor of bytes on it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage while the storage lives."""
    return storage_identity(tensor.untyped_storage())


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage with a strided tensor's bytes; None if it has none.

    Zero tensors, functional ones and tensors of a class that wraps others have a size, but no memory. Those of
    ``torch.func`` have no storage. A tensor of :class:`FakeMemory` counts as one with memory.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    is_fake = isinstance(tensor, FakeTensor)  # torch warns about reading its address
    try:
        storage = tensor.untyped_storage()
        is_there = storage.nbytes() > 0 and (stands_for_memory(tensor) if is_fake else storage.data_ptr() != 0)
    except (RuntimeError, NotImplementedError):
        return None
    return storage if is_there else None


def has_storage(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether it is an ordinary strided tensor (no subclass, sparse or nested one) with memory on that device.

    A tensor of :class:`FakeMemory` counts as such.
    """
    is_ordinary = type(tensor) in _ORDINARY or stands_for_memory(tensor)
    return is_ordinary and tensor.device.type == device_type and memory_of(tensor) is not None


_ORDINARY = _TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The ordinary tensors that a sparse, nested or wrapping tensor is made of; for other tensors, the tensor."""
    if isinstance(tensor, FakeTensor) or type(tensor) in _ORDINARY:
        if tensor.is_nested:
            return [tensor.detach().values()]
        names = _PARTS.get(tensor.layout, ())
        return [getattr(tensor.detach(), name)() for name in names] if names else [tensor]
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for one in inner if isinstance(one, torch.Tensor) for part in parts_of(one)]


_PARTS = {
    torch.sparse_coo: COO_PARTS,
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_made_of_parts(tensor: torch.Tensor) -> bool:
    """Whether it is sparse, nested or wraps other tensors, so that no plan moves or rebuilds it."""
    return tensor.is_nested or tensor.layout in _PARTS or hasattr(tensor, "__tensor_flatten__")


def stands_for_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a fake tensor of a profile."""
    return type(tensor) is FakeTensor and isinstance(tensor.fake_mode, FakeMemory)


def is_plain(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether the runtime may move and rebuild it: it has a storage, which contains exactly its elements."""
    return plain_storage(tensor, device_type) is not None


def plain_storage(tensor: torch.Tensor, device_type: str) -> torch.UntypedStorage | None:
    """The storage of a tensor that :func:`is_plain`; None for other tensors."""
    kind = type(tensor)
    if kind is _TENSOR or kind is _PARAMETER:
        keys, found = dispatch_keys(tensor).raw_repr(), _PLAIN[device_type]
        known = found.get(keys)
        if known is None:
            known = found[keys] = _is_plain(tensor, device_type)
    else:
        known = stands_for_memory(tensor) and _is_plain(tensor, device_type)
    if not known:
        return None
    storage = tensor.untyped_storage()
    return storage if storage.nbytes() > 0 else None


_PLAIN: defaultdict[str, dict[int, bool]] = defaultdict(dict)
"""By type of device and dispatch keys, which determine all that it checks: the result of :func:`is_plain`."""


def _is_plain(tensor: torch.Tensor, device_type: str) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == device_type
        and not tensor.is_nested
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not is_zero(tensor)
        and not wraps_another(tensor)
    )


def is_host_scalar(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether it is a single number in host memory, which an op on another device may take by value."""
    return device_type != "cpu" and tensor.ndim == 0 and is_plain(tensor, "cpu")


def static_keys(model: torch.nn.Module, device_type: str) -> set[int]:
    """Storage keys of the model's parameters and buffers, which no plan touches."""
    return {key for tensor in own_tensors(model) for key in keys_of(tensor, device_type)}


def keys_of(tensor: torch.Tensor, device_type: str) -> Sequence[int]:
    """Storage keys of a tensor, or of its parts, on that device."""
    storage = plain_storage(tensor, device_type)
    if storage is not None:
        return (storage_identity(storage),)
    return [storage_key(part) for part in parts_of(tensor) if has_storage(part, device_type)]


def own_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a model, each module's once. It makes no names, because every step calls it."""
    for module in modules_of(model):
        for tensor in (*owned_parameters(module).values(), *owned_buffers(module).values()):
            if tensor is not None:
                yield tensor


def check_unwritten(tensor: torch.Tensor, version: int, what: str) -> None:
    """Raises autograd's error if a saved tensor, named ``what``, was written in place since it had that version."""
    if version_of(tensor) != version:
        raise users(
            RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{what} is at version {version_of(tensor)}; expected version {version} instead. "
                "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
                "with torch.autograd.set_detect_anomaly(True)."
            )
        )


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its gradient. Of a tensor that gets none, such as one that ``functional_call`` has put in a parameter's place, it
    is not read: torch warns of that.
    """
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


class CheckedTensor:
    """A saved tensor that is held unchanged, as autograd holds it. ``what``: its name in an error."""

    def __init__(self, tensor: torch.Tensor, what: str) -> None:
        self._tensor, self._version, self._what = detached_alias(tensor), version_of(tensor), what

    def given_back(self) -> torch.Tensor:
        """The tensor. Raises ``RuntimeError``, as autograd would, if it was written in place."""
        check_unwritten(self._tensor, self._version, self._what)
        return self._tensor


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares ``tensor``'s version counter.

    ``detach`` shares the counter, and assigning ``.data`` replaces the alias's storage but not the counter. So the
    probe's version shows in-place writes to a value, even after the runtime has released its device memory.
    """
    probe = detached_alias(tensor)
    probe.data = _empty(tensor.dtype, tensor.device)
    return probe


@functools.cache
def _empty(dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=where)


def counted_by(probe: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the version counter of that probe, which moves where backward writes it in place."""
    alias = detached_alias(probe)
    alias.data = tensor
    return alias


def saved_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, which is saved in its place; any other tensor itself. So is a DTensor that was
    written in place, because its local tensor does not show such writes.
    """
    local = local_tensor(tensor)
    return tensor if local is tensor or tensor.is_inference() or version_of(tensor) else local


class Shell(msgspec.Struct, frozen=True, eq=False):
    """A DTensor without the local tensor that is saved in its place."""

    probe: torch.Tensor
    """A DTensor without memory, which shares the version counter."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shell:
        """Of a DTensor of which there is a :func:`saved_part`."""
        return cls(without_local_tensor(tensor))

    def around(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor, around a local tensor. Raises ``RuntimeError``, as autograd would, if it was written since."""
        check_unwritten(self.probe, 0, "a saved tensor")
        return around_local_tensor(self.probe, local)

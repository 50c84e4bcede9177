"""Deferred unpacks: a compiled backward gets placeholders first, and each saved tensor where it first needs it.

A placeholder has the geometry of the saved tensor, and is on torch's device without memory. The op
``poochplan::deferred_unpack`` (``points.py``) takes it and returns the tensor. A placeholder is only handed out if the
source of the code that is about to run was read and has that op: caches may return code that was made without our
partitioner, and a compiler may drop an op. If the source cannot be read, no unpack is deferred.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from poochplan.errors import StepError
from poochplan.runtime.metering.allocated import joined_count
from poochplan.tensors.modes import in_compiled_call
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.compiler_internals import code_of_backward, is_compiled_backward
from poochplan.torch_private.hooks import Hooks
from poochplan.torch_private.tensor_internals import backward_node, graph_task, storage_identity, unseen_by_modes


def parts_are_measured(device_type: str) -> bool:
    """Whether the memory of the parts of a compiled backward, between two deferred unpacks, can be known. Only the
    compiled allocator's log shows which memory one part allocates and another frees.
    """
    return device_type == "cpu" and joined_count() is not None


# -- placeholders ----------------------------------------------------------------------------------------------------


_WAITING: dict[int, tuple[Callable[[], torch.Tensor], bool, weakref.ref[torch.UntypedStorage]]] = {}
"""By the identity of a placeholder's storage, which stays the same when autograd makes new tensors on it: the function
that returns the tensor, whether it may be called more than once, and what ends the entry when the placeholder dies."""


def placeholder_for(geometry: Geometry, unpack: Callable[[], torch.Tensor], *, again: bool = False) -> torch.Tensor:
    """A placeholder of that geometry, whose tensor ``unpack`` returns; ``again``: each time, not only once."""
    with unseen_by_modes():
        placeholder = torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype, device="meta")
    storage = placeholder.untyped_storage()
    key = storage_identity(storage)
    _WAITING[key] = unpack, again, weakref.ref(storage, lambda _: _WAITING.pop(key, None))
    return placeholder


def unpack_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The function that returns a placeholder's tensor; None for any other tensor.

    Raises ``StepError`` for a placeholder that was filled before, or is unknown: it has no memory to be read.
    """
    if not tensor.is_meta:
        return None
    key = storage_identity(tensor.untyped_storage())
    found = _WAITING.get(key)
    if found is None:
        raise StepError(
            "a tensor saved in compiled code was asked for twice, or changed by other saved-tensors hooks; "
            "remove those hooks, or have them return what they get"
        )
    unpack, again, _ = found
    if not again:
        del _WAITING[key]
    return unpack


def waiting() -> int:
    """Number of placeholders that were handed out, were not finally filled, and are alive."""
    return len(_WAITING)


# -- hooks -----------------------------------------------------------------------------------------------------------


class AtSavePoint(NamedTuple):
    """A save point gives this to a pack hook of :func:`deferring` in place of a tensor. It makes the placeholder."""

    tensor: torch.Tensor


class _Saved(NamedTuple):
    """A tensor that was packed inside a compiled callable, or the placeholder that its save point has made. Other
    objects unpacked while a compiled backward runs, such as the input of a checkpoint around it, are not its own.
    """

    packed: Any
    placeholder: torch.Tensor | None = None


def deferring(hooks: Hooks, may_wait: Callable[[Any], Geometry | None], device_type: str) -> Hooks:
    """Hooks that defer unpacks of compiled backwards. If parts cannot be measured, ``hooks`` themselves.

    ``may_wait`` returns the geometry of the tensor behind a packed object; None if it must be unpacked at once.
    """
    if not parts_are_measured(device_type):
        return hooks
    pack, unpack = hooks

    def pack_or_mark(tensor: Any) -> Any:
        if type(tensor) is AtSavePoint:
            return pack(tensor.tensor)
        if _WAITING and tensor.is_meta and storage_identity(tensor.untyped_storage()) in _WAITING:
            return _Saved(None, tensor)  # it stands for a tensor that was not finally unpacked
        packed = pack(tensor)
        return _Saved(packed) if in_compiled_call() else packed

    def unpack_or_wait(found: Any) -> torch.Tensor:
        if type(found) is not _Saved:
            return unpack(found)
        node = backward_node()
        position = _next_position(node) if node is not None and is_compiled_backward(node) else None
        if found.placeholder is not None:
            return found.placeholder
        if position is None or position not in deferred_positions(node):
            return unpack(found.packed)
        geometry = may_wait(found.packed)
        return unpack(found.packed) if geometry is None else placeholder_for(geometry, partial(unpack, found.packed))

    _DEFERRING.add(pack_or_mark)
    return pack_or_mark, unpack_or_wait


def plainly(hooks: Hooks) -> Hooks:
    """Hooks that do the same as those of :func:`deferring`, where these have failed: nothing is deferred any more."""
    pack, unpack = hooks

    def packed(tensor: Any) -> Any:
        if type(tensor) is AtSavePoint:
            return pack(tensor.tensor)
        is_waiting = bool(_WAITING) and tensor.is_meta and storage_identity(tensor.untyped_storage()) in _WAITING
        return _Saved(None, tensor) if is_waiting else pack(tensor)

    def unpacked(found: Any) -> torch.Tensor:
        if type(found) is not _Saved:
            return unpack(found)
        return unpack(found.packed) if found.placeholder is None else found.placeholder

    return packed, unpacked


_DEFERRING: weakref.WeakSet[Callable[[torch.Tensor], Any]] = weakref.WeakSet()


def defers(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Whether the hook comes from :func:`deferring`: it takes objects of save points, and knows placeholders."""
    return inspect.unwrap(pack) in _DEFERRING


_RUN = "poochplan_run"
"""On the node of a compiled backward: the running backward pass, and the number of tensors that it has unpacked."""


def _next_position(node: Any) -> int:
    """The position of the node's next saved tensor, in the order of unpacking."""
    task, (run, unpacked) = graph_task(), getattr(node, _RUN, (None, 0))
    position = unpacked if run == task else 0
    setattr(node, _RUN, (task, position + 1))
    return position


# -- running code ----------------------------------------------------------------------------------------------------

_CALL = re.compile(r"^( *)def call\((?:self, )?args\):\n", re.MULTILINE)
_ARGUMENTS = re.compile(r"^ *(\w+(?:, \w+)*),? = args$", re.MULTILINE)
_DEFERRED_UNPACK = re.compile(r"^ *\w+ = torch\.ops\.poochplan\.deferred_unpack\.default\((\w+), \w+\)$")
_HARMLESS = re.compile(r"^ *(?:assert_size_stride\((\w+), .*|del (\w+))$")
_NAME = re.compile(r"\w+")

_NOTHING: frozenset[int] = frozenset()
_READ: weakref.WeakKeyDictionary[type, tuple[object, frozenset[int]]] = weakref.WeakKeyDictionary()
"""By the node's class (each compiled callable has its own): the function that it calls, and what reading it gave."""


def deferred_positions(node: Any) -> frozenset[int]:
    """The positions of the node's deferred saved tensors, in the order of unpacking."""
    called, source, number_count = code_of_backward(node)
    read = _READ.get(type(node))
    if read is not None and read[0] is called:
        return read[1]
    if called is None:  # it is compiled when it first runs
        return _NOTHING
    found = frozenset(place - number_count for place in deferred_arguments(source) if place >= number_count)
    _READ[type(node)] = called, found
    return found


def deferred_arguments(source: str) -> frozenset[int]:
    """The positions of the deferred arguments of the function ``call`` that ``source`` defines.

    An argument counts only if the code names it in its list of arguments, in one deferred unpack, and elsewhere only to
    check its shape or to delete it.
    """
    lines = list(_body(source))
    unpacking = [found for found in map(_ARGUMENTS.match, lines) if found]
    if len(unpacking) != 1:
        return _NOTHING
    arguments = unpacking[0].group(1).split(", ")
    times = dict.fromkeys(arguments, 0)
    read_otherwise: set[str] = set()
    for line in lines:
        if _ARGUMENTS.match(line):
            continue
        names = set(_NAME.findall(line))
        deferred, harmless = _DEFERRED_UNPACK.match(line), _HARMLESS.match(line)
        if deferred is not None and deferred.group(1) in times:
            times[deferred.group(1)] += 1
            names.discard(deferred.group(1))
        elif harmless is not None:
            names.discard(harmless.group(1) or harmless.group(2))
        read_otherwise |= names
    return frozenset(place for place, name in enumerate(arguments) if times[name] == 1 and name not in read_otherwise)


def _body(source: str) -> Iterator[str]:
    """The lines of the one function ``call``, without comments."""
    begins = list(_CALL.finditer(source))
    if len(begins) != 1:
        return
    indent = len(begins[0].group(1))
    for line in source[begins[0].end() :].splitlines():
        text = line.lstrip(" ")
        if not text or text.startswith("#"):
            continue
        if len(line) - len(text) <= indent:
            return
        yield line

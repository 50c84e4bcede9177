"""The census: which device storages are live now, and how many bytes each takes, whatever code created them.

A meter that sees only ops knows memory outside the step only if an op uses it. Python's garbage collector knows every
tensor that Python has. So a data set, a copy of the weights or a kept loss counts automatically.

It also measures growth outside the step: how fast it is, and how much an optimizer will still add.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import compress, pairwise
from typing import Any, TypeVar

import torch

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES, rounded_up
from poochplan.tensors.optimizers import is_away
from poochplan.tensors.storages import is_made_of_parts, memory_of, parts_of
from poochplan.torch_private.tensor_internals import storage_identity, tensors_in, without_modes, without_torch_function

T = TypeVar("T")
DataParallel = torch.nn.parallel.DistributedDataParallel
LEAST_BYTES = 4096
"""Smaller storages that no op uses are left out: constants of libraries, which every process has."""

EVERY = 50
"""After the first steps, one step in this many begins with a census, because memory also changes later in a run."""

Storages = dict[int, torch.UntypedStorage]
"""Storages by identity."""

_LEFT_OUT: dict[int, weakref.ref[torch.UntypedStorage]] = {}
SEEN = 3
"""Growth counts if it was seen so many times in a row. Memory that appeared once, as a copy of the weights, is none."""


def leave_out(tensors: Iterable[torch.Tensor]) -> None:
    """No census counts these tensors: a check of steps keeps them, and training does not."""
    for tensor in tensors:
        for storage in storages_of(tensor, tensor.device.type):
            key = storage_identity(storage)
            _LEFT_OUT[key] = weakref.ref(storage, lambda _, key=key: _LEFT_OUT.pop(key, None))  # type: ignore[misc]


def census(device_type: str, least_bytes: int = LEAST_BYTES) -> Storages:
    """Storages on that device of at least that many bytes that a Python tensor uses."""
    found: Storages = {}
    with without_modes(), without_torch_function():
        for tensor in live(torch.Tensor):
            for storage in storages_of(tensor, device_type):
                if storage.nbytes() >= least_bytes:
                    found[storage_identity(storage)] = storage
    for key in found.keys() & _LEFT_OUT.keys():
        if _LEFT_OUT[key]() is found[key]:
            del found[key]
    return found


def census_bytes(device_type: str, most_bytes: float = math.inf) -> int:
    """Bytes of all storages, even small ones, each rounded up to the allocation unit. If they exceed ``most_bytes``,
    values that wait for Python's collector are freed and not counted.
    """
    found_bytes = sum(rounded_up(storage.nbytes()) for storage in census(device_type, 1).values())
    if found_bytes <= most_bytes:
        return found_bytes
    gc.collect()
    return census_bytes(device_type)


class _IsWanted(dict[type, bool]):
    """Tests the type and does not call ``isinstance``, which runs code of proxies."""

    def __missing__(self, kind: type) -> bool:
        found = self[kind] = issubclass(kind, _WANTED)
        return found


class _Moment(threading.local):
    is_one = False
    seen: list[weakref.ref[Any]] | None = None


_WANTED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
_moment = _Moment()


@contextlib.contextmanager
def one_moment() -> Iterator[None]:
    """Within the block, every census sees the objects of the first one, except those that have died since. Looking at
    the 400,000 objects of a usual process takes as long as a short step.
    """
    _moment.is_one = True
    try:
        yield
    finally:
        _moment.is_one, _moment.seen = False, None


def live(kind: type[T]) -> list[T]:
    """Every object of that class that Python's collector knows: tensors, modules, optimizers or gradient scalers."""
    seen = _moment.seen
    if seen is None:
        things = gc.get_objects()
        seen = [weakref.ref(one) for one in compress(things, map(_IsWanted().__getitem__, map(type, things)))]
        if _moment.is_one:
            _moment.seen = seen
    return [one for one in (reference() for reference in seen) if one is not None and issubclass(type(one), kind)]


def storages_of(tensor: torch.Tensor, device_type: str) -> Iterator[torch.UntypedStorage]:
    """The storages on that device of a tensor of any class, or of the tensors that it consists of."""
    try:
        for part in parts_of(tensor) if is_made_of_parts(tensor) else [tensor]:
            storage = memory_of(part) if part.device.type == device_type else None
            if storage is not None and storage.device.type == device_type:
                yield storage
    except (RuntimeError, NotImplementedError, AttributeError):
        return  # a class that is not ready yet


def wrapper_of(model: torch.nn.Module) -> DataParallel | None:
    """The wrapper for data-parallel training that the model is, or that contains it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if isinstance(model, DataParallel):
        return model
    return next((one for one in live(DataParallel) if one.module is model), None)


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of the wrapper's buckets: as many as the gradients, if these do not lie in the buckets."""
    wrapper = wrapper_of(model)
    if wrapper is None or wrapper.gradient_as_bucket_view:
        return 0
    return sum(rounded_up(one.nbytes) for one in wrapper.parameters() if one.requires_grad)


class Growth:
    """State: the last few sizes of the memory outside segments of one kind, with the segments' numbers, and the number
    of the segment whose memory is to be measured next.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque(maxlen=SEEN)
        self._next: float = math.inf

    def saw(self, number: int, size_bytes: int) -> None:
        """That many bytes existed when the segment began."""
        if not self._seen or number > self._seen[-1][0]:
            self._seen.append((number, size_bytes))

    @property
    def latest_bytes_per_segment(self) -> float:
        """Growth between the last two measurements; 0 if memory did not increase."""
        return max(0.0, self._rates()[-1]) if len(self._seen) > 1 else 0.0

    @property
    def steady_bytes_per_segment(self) -> float:
        """Growth that occurred each time; 0 if it did not."""
        return max(0.0, min(self._rates())) if len(self._seen) == SEEN else 0.0

    def is_due(self, number: int) -> bool:
        """Whether that segment's memory is to be measured because of earlier growth."""
        return number >= self._next

    def outgrown(self, number: int, profile: Profile, plan: Plan, device_type: str) -> int:
        """Bytes live when a segment begins, and not when it was profiled; 0 if the plan fits its budget with them."""
        there = (value for value in profile.values if value.born < 0 and value.born_tick is None)
        there_bytes = sum(rounded_up(value.size_bytes) for value in there)
        spare_bytes = max(0, plan.budget_bytes - max(plan.prediction.peak_bytes, plan.covered_bytes))
        now_bytes = census_bytes(device_type, there_bytes + spare_bytes)
        self.saw(number, now_bytes)
        more_bytes = now_bytes - there_bytes
        room_bytes = spare_bytes - more_bytes
        rate = self.latest_bytes_per_segment
        self._next = number + max(1.0, room_bytes / rate / 2) if rate else math.inf
        return more_bytes if room_bytes < 0 else 0

    def ahead_bytes(self, number: int, foreseen_bytes: int) -> int:
        """Bytes to leave free for growth: the known one, else that of a loop that runs for as long again as it has."""
        return foreseen_bytes or int(self.steady_bytes_per_segment * max(EVERY, number))

    def _rates(self) -> list[float]:
        return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(self._seen)]


def state_of_optimizers(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The state of the optimizers that step any of these parameters, as far as it is on their device."""
    mine = set(parameters)
    found = live(torch.optim.Optimizer)
    own = (one for one in found if any(not mine.isdisjoint(group["params"]) for group in one.param_groups))
    return [one for one in tensors_in([list(one.state.values()) for one in own]) if not is_away(one)]


def foreseen_bytes(optimizers: Iterable[torch.optim.Optimizer], device_type: str) -> int:
    """Bytes that the states of these optimizers will add, if that is known: LBFGS's history.

    LBFGS keeps two flat vectors of all parameters and two numbers for each of its iterations, up to ``history_size``.
    """
    found_bytes = 0
    for optimizer in (one for one in optimizers if isinstance(one, torch.optim.LBFGS)):
        (group,) = optimizer.param_groups
        parameters = [one for one in group["params"] if one.device.type == device_type]
        if parameters:
            state = optimizer.state.get(parameters[0], {})
            left = max(0, group["history_size"] - len(state.get("old_dirs") or ()))
            vector_bytes = sum(one.numel() * one.element_size() for one in parameters)
            found_bytes += left * 2 * (rounded_up(vector_bytes) + ALLOCATION_UNIT_BYTES)
    return found_bytes


def left_free(ahead_bytes: int, room_bytes: int) -> int:
    """How much of the room between the smallest budget and this one is left for growth: all that is wanted if it fits,
    else half of the room, because plans need some.
    """
    return ahead_bytes if ahead_bytes <= room_bytes else room_bytes // 2

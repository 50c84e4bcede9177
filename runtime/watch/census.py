"""The census: which device storages live right now, whoever made them, and how many bytes each takes.

A meter that sees ops alone knows what lives beside the step only where an op meets it. Python's garbage collector knows
every tensor that Python has, so a data set, a copy of the weights or a kept loss counts without being told.

What grows there is told too: how fast, and how much an optimizer will still add.
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
from poochplan.tensors.storages import is_made_of_parts, memory_of, parts_of
from poochplan.torch_private.tensor_internals import pytree, storage_identity, without_modes, without_torch_function

T = TypeVar("T")
DataParallel = torch.nn.parallel.DistributedDataParallel
LEAST_BYTES = 4096
"""What is smaller and is met by no op is left out: constants of libraries, of which every process has some."""

EVERY = 50
"""Of the steps behind the first ones, every so many begins at a census: memory changes in a long run, too."""

Storages = dict[int, torch.UntypedStorage]
"""By identity."""

_LEFT_OUT: dict[int, weakref.ref[torch.UntypedStorage]] = {}
SEEN = 3
"""Growth counts where it was seen twice in a row: what has come once, such as a copy of the weights, does not grow."""


def leave_out(tensors: Iterable[torch.Tensor]) -> None:
    """No census counts these: what a check of steps keeps of them is not the training's."""
    for tensor in tensors:
        for storage in storages_of(tensor, tensor.device.type):
            key = storage_identity(storage)
            _LEFT_OUT[key] = weakref.ref(storage, lambda _, key=key: _LEFT_OUT.pop(key, None))  # type: ignore[misc]


def census(device_type: str, least_bytes: int = LEAST_BYTES) -> Storages:
    """The storages of at least that many bytes on that device that a Python tensor lies on."""
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
    """Bytes of all storages, however small, each rounded up to what is allocated at once. If they are more than
    ``most_bytes``, what waits for Python's collector is freed and not counted.
    """
    found_bytes = sum(rounded_up(storage.nbytes()) for storage in census(device_type, 1).values())
    if found_bytes <= most_bytes:
        return found_bytes
    gc.collect()
    return census_bytes(device_type)


class _IsWanted(dict[type, bool]):
    """By type and not by ``isinstance``, which runs code of proxies."""

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
    """Looks in the block see what its first look saw, except what has died since. A look at the 400,000 objects of a
    usual process takes as long as a short step.
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
    """The storages on that device of a tensor, whatever its class, or of what it is made of."""
    try:
        for part in parts_of(tensor) if is_made_of_parts(tensor) else [tensor]:
            storage = memory_of(part) if part.device.type == device_type else None
            if storage is not None and storage.device.type == device_type:
                yield storage
    except (RuntimeError, NotImplementedError, AttributeError):
        return  # a class that is not ready yet


def wrapper_of(model: torch.nn.Module) -> DataParallel | None:
    """The model for data-parallel training that is this one, or that has been put around it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if isinstance(model, DataParallel):
        return model
    return next((one for one in live(DataParallel) if one.module is model), None)


def bucket_bytes(model: torch.nn.Module) -> int:
    """What its buckets take: as much as the gradients, where these do not lie in them."""
    wrapper = wrapper_of(model)
    if wrapper is None or wrapper.gradient_as_bucket_view:
        return 0
    return sum(rounded_up(one.nbytes) for one in wrapper.parameters() if one.requires_grad)


class Growth:
    """State: the last few sizes of what lives beside segments of one kind, with the segments' numbers; that of the
    segment which is to be looked at next.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque(maxlen=SEEN)
        self._next: float = math.inf

    def saw(self, number: int, size_bytes: int) -> None:
        """So many bytes were there as that segment began."""
        if not self._seen or number > self._seen[-1][0]:
            self._seen.append((number, size_bytes))

    @property
    def latest_bytes_per_segment(self) -> float:
        """Between the last two looks; 0 where it did not become more."""
        return max(0.0, self._rates()[-1]) if len(self._seen) > 1 else 0.0

    @property
    def steady_bytes_per_segment(self) -> float:
        """What it has grown by each time; 0 where it did not each time."""
        return max(0.0, min(self._rates())) if len(self._seen) == SEEN else 0.0

    def is_due(self, number: int) -> bool:
        """Whether that segment is to be looked at because of what was seen before."""
        return number >= self._next

    def outgrown(self, number: int, profile: Profile, plan: Plan, device_type: str) -> int:
        """Bytes that live now, as a segment begins, and did not when it was profiled; 0 where the plan fits its budget
        with them.
        """
        there = (value for value in profile.values if value.born < 0 and value.born_tick is None)
        there_bytes = sum(rounded_up(value.size_bytes) for value in there)
        spare_bytes = plan.budget_bytes - plan.prediction.peak_bytes
        now_bytes = census_bytes(device_type, there_bytes + spare_bytes)
        self.saw(number, now_bytes)
        more_bytes = now_bytes - there_bytes
        room_bytes = spare_bytes - more_bytes
        rate = self.latest_bytes_per_segment
        self._next = number + max(1.0, room_bytes / rate / 2) if rate else math.inf
        return more_bytes if room_bytes < 0 else 0

    def ahead_bytes(self, number: int, foreseen_bytes: int) -> int:
        """To be left free for growth: what is foreseen, else as much as it grows while the loop goes on for as long
        again as it has.
        """
        return foreseen_bytes or int(self.steady_bytes_per_segment * max(EVERY, number))

    def _rates(self) -> list[float]:
        return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(self._seen)]


def state_of_optimizers(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What the optimizers hold that step any of these parameters."""
    mine = set(parameters)
    found = live(torch.optim.Optimizer)
    own = [one for one in found if any(not mine.isdisjoint(group["params"]) for group in one.param_groups)]
    leaves = pytree.tree_leaves([list(one.state.values()) for one in own])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def foreseen_bytes(optimizers: Iterable[torch.optim.Optimizer], device_type: str) -> int:
    """Bytes that the states of these will take beyond what they take now, where that is known: LBFGS's history.

    Of each of its iterations LBFGS keeps two flat vectors of all parameters and two numbers, up to ``history_size``.
    """
    return sum(_history_bytes(one, device_type) for one in optimizers if isinstance(one, torch.optim.LBFGS))


def _history_bytes(optimizer: torch.optim.LBFGS, device_type: str) -> int:
    (group,) = optimizer.param_groups
    parameters = [one for one in group["params"] if one.device.type == device_type]
    if not parameters:
        return 0
    state = optimizer.state.get(parameters[0], {})
    left = group["history_size"] - len(state.get("old_dirs") or ())
    vector_bytes = sum(one.numel() * one.element_size() for one in parameters)
    return max(0, left) * 2 * (rounded_up(vector_bytes) + ALLOCATION_UNIT_BYTES)


def left_free(ahead_bytes: int, room_bytes: int) -> int:
    """How much of the room between the smallest budget and this one is left to growth: all that is wanted if it fits,
    else half of the room, for plans need some.
    """
    return ahead_bytes if ahead_bytes <= room_bytes else room_bytes // 2

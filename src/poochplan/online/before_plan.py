"""BeforePlan: how steps without a plan run, because no plan exists yet or none fits."""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Literal

import torch

from poochplan.formats.run_record import segments_expand
from poochplan.profiler.live.step_kinds import Loop
from poochplan.runtime.devices.allocator import in_session
from poochplan.runtime.devices.backend import backend_of, memory_left
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.metering.allocated import joined_count
from poochplan.runtime.metering.census import EVERY, census_bytes
from poochplan.runtime.plan_source import Attached
from poochplan.runtime.step_policies.step_policy import KeepWhileRoom, StepPolicy, SwapEach
from poochplan.tensors.storages import gradient_of, own_tensors

SHARE_TAKEN = 0.9
"""Share of the free memory that may be taken."""
STATES_PER_PARAMETER = 2
"""Number of tensors of a parameter's size that an optimizer may add for it (Adam adds two), assumed until its first
step."""
AT_ONCE_S = 2.0
SHARE = 0.1
"""Share of the loop's run time, if that is more."""
LEAST_S = 0.05
"""A shorter pause is not worth it."""


class Unplanned(StrEnum):
    """How a step without a plan runs."""

    IN_CORE = "in-core"
    """Values are kept as long as memory has room, and swapped afterwards."""
    SWAP = "swap"
    """Every saved value is swapped."""


Mode = Literal["in-core", "swap"]


class BeforePlan:
    """Gives steps without a plan their policies. The device's memory is read when it is needed.

    Parameters
    ----------
    before: how steps run while there is no plan.
    refused: how steps run if no plan fits the budget.
    loop: its optimizers tell what is to come.
    """

    def __init__(self, before: Unplanned, refused: Unplanned, loop: Loop) -> None:
        self.before, self.refused, self._loop = before, refused, loop
        self._where = loop.where
        self._while_room = KeepWhileRoom(self._room, self._is_short, self._largest_at)
        self._within: KeepWhileRoom | None = None
        self._within_steps = self._beside_bytes = 0
        self.is_bound = False
        """Whether a step that never gets a plan had no room in the budget, so that some values were swapped."""

    def attached(self, attachment: Attached) -> None:
        self._attachment = attachment

    def policy(self, *, is_refused: bool = False) -> StepPolicy:
        """Policy of a step that is to get a plan, or that will get none."""
        mode = self.refused if is_refused else self.before
        vars(self).pop("_widest", None)  # layers may have been replaced since the last step
        return SwapEach(at_once=True) if mode is Unplanned.SWAP else self._while_room

    @functools.cached_property
    def knows_reserved(self) -> bool:
        """Whether budgets cover reserved bytes by default: on a GPU whose allocator follows the known rules."""
        return self._where.type == "cuda" and in_session().expand is not None

    @property
    def can_bind(self) -> bool:
        """Whether steps that never get a plan can keep within a budget and are not asked to swap everything."""
        can_tell = self._where.type != "cpu" or joined_count() is not None
        return can_tell and self.refused is Unplanned.IN_CORE

    def within(self, budget_bytes: int) -> StepPolicy | None:
        """Policy of a step that never gets a plan, and keeps its values as long as the budget has room. None if nothing
        tells how many bytes are live, or if all steps are to swap.
        """
        if not self.can_bind:
            return None
        if self._where.type == "cpu" and self._within_steps % EVERY == 0:
            self._beside_bytes += census_bytes("cpu") - self._live_bytes()
        self._within_steps += 1
        if self._within is None:
            room = lambda: min(self._room(), budget_bytes - self._live_bytes() - self._to_come_bytes())  # noqa: E731
            self._within = KeepWhileRoom(room, self._binds, self._largest_at)
        vars(self).pop("_widest", None)
        return self._within

    def _is_short(self) -> None:
        self._attachment.memory_is_short()

    def _binds(self) -> None:
        self.is_bound = True
        self._is_short()

    def _live_bytes(self) -> int:
        if self._where.type == "cuda":
            return torch.cuda.memory_reserved(self._where) - cached_bytes(self._where)
        if self._where.type != "cpu":
            return backend_of(self._where).allocated_bytes()
        count = joined_count()
        return self._beside_bytes + (count.live_bytes if count is not None else 0)

    def is_plentiful(self, needed_bytes: int) -> bool:
        """Whether a step without a plan was in-core and would be with twice the bytes, so that nobody need look."""
        return self.refused is Unplanned.IN_CORE and not self._while_room.swaps and self._room() > 2 * needed_bytes

    def room_of(self, budget_bytes: int) -> int:
        """Most bytes that a step may take while it is profiled: the budget, or the device's memory."""
        if self.before is Unplanned.SWAP:
            return budget_bytes
        return max(budget_bytes, census_bytes(self._where.type) + int(SHARE_TAKEN * free_bytes(self._where)))

    def has_room(self, needed_bytes: int, budget_bytes: int) -> bool:
        """Whether a profiled step may take that many bytes in addition to all live memory. It takes a census only as
        the last resort.
        """
        is_free = self.before is Unplanned.IN_CORE and needed_bytes <= SHARE_TAKEN * free_bytes(self._where)
        return is_free or needed_bytes <= self.room_of(budget_bytes)

    def _room(self) -> int:
        return int(SHARE_TAKEN * free_bytes(self._where)) - self._to_come_bytes()

    def _largest_at(self, value: SavedValue) -> int:
        """Bytes of the value or, if it is larger, of its product with a weight, such as the one that gives a language
        model's logits: those are made behind all other values, and much larger.
        """
        if value.geometry is None or not value.geometry.shape:
            return value.size_bytes
        *rows, width = value.geometry.shape
        product_bytes = math.prod(rows) * self._widest.get(width, 0) * value.geometry.dtype.itemsize
        return max(value.size_bytes, product_bytes)

    @functools.cached_property
    def _widest(self) -> dict[int, int]:
        """For each width of a matrix of the model, the largest other width. Either may be the input's."""
        layers = (layer for layer in self._loop.model.modules() if not isinstance(layer, torch.nn.Embedding))
        matrices = (one.shape for layer in layers for one in layer.parameters(recurse=False) if one.ndim == 2)
        widest = dict[int, int]()
        for pair in matrices:
            for width, other in itertools.permutations(pair):
                widest[width] = max(other, widest.get(width, 0))
        return widest

    def _to_come_bytes(self) -> int:
        """Bytes of gradients that do not exist yet, and of the state of optimizers that have not stepped."""
        parameters = [one for one in own_tensors(self._loop.model) if one.is_leaf and one.requires_grad]
        stateful = {id(one) for optimizer in self._loop.optimizers for one in optimizer.state}
        tensors = ((gradient_of(one) is None) + STATES_PER_PARAMETER * (not stateful) for one in parameters)
        return sum(count * one.nbytes for count, one in zip(tensors, parameters, strict=True))


def free_bytes(where: torch.device) -> int:
    """Bytes that one process may still take there, including memory that torch's allocator has reserved. The ranks of a
    host share its memory.
    """
    left_bytes = memory_left(where)
    return left_bytes // ranks_here() if where.type == "cpu" else left_bytes + cached_bytes(where)


def cached_bytes(where: torch.device) -> int:
    """Reserved bytes that any request may get: those beside a block in use are fragments, unless segments expand."""
    stats = backend_of(where).statistics()
    free, fragments = (
        int(stats.get(name, {}).get("all", {}).get("current", 0)) for name in ("reserved_bytes", "inactive_split_bytes")
    )
    free -= int(stats["allocated_bytes"]["all"]["current"])
    return free if where.type == "cuda" and segments_expand() else max(0, free - fragments)


def ranks_here() -> int:
    """Number of processes of this training on the host."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(ranks)) if ranks.isdigit() else 1


def has_no_processor_to_spare() -> bool:
    """Whether training computes on all processors. Background work is then expensive: threads of one op wait for the
    one whose processor is taken, and for each other. A pause costs less.
    """
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.get_num_threads() * ranks_here() >= there


class PauseBudget:
    """State: when the loop began, and how long it has paused."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._spent_s = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since the loop began."""
        return time.monotonic() - self._since_s

    @property
    def left_s(self) -> float:
        """Seconds that the loop may still pause now. Negative if it has paused for too long."""
        return max(AT_ONCE_S, SHARE * self.age_s) - self._spent_s

    def spend(self, work: Callable[[float], object], least_s: float = LEAST_S) -> bool:
        """Runs ``work(most_s)`` during a pause of the loop, if a pause is better than background work and has been
        earned. Returns whether it ran.
        """
        left_s = self.left_s
        if left_s < least_s or not has_no_processor_to_spare():
            return False
        start_s = time.monotonic()
        try:
            work(left_s)
        finally:
            self._spent_s += time.monotonic() - start_s
        return True

"""Growth: what lives beside the step and becomes more; how fast, and how much an optimizer will still add."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

import torch

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import ALLOCATION_UNIT_BYTES, rounded_up
from poochplan.torch_private.tensor_internals import pytree

from .census import EVERY, census_bytes

SEEN = 3
"""Growth counts where it was seen twice in a row: what has come once, such as a copy of the weights, does not grow."""


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
        now_bytes = census_bytes(device_type)
        self.saw(number, now_bytes)
        there = (value for value in profile.values if value.born < 0 and value.born_tick is None)
        more_bytes = now_bytes - sum(rounded_up(value.size_bytes) for value in there)
        room_bytes = plan.budget_bytes - plan.prediction.peak_bytes - more_bytes
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
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
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

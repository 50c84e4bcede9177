"""Bytes that torch's allocator reserves on a GPU for a planned step, by the model of ``caching_allocator.py``."""

from __future__ import annotations

from collections import Counter

from poochplan.formats.profile import Kind, Memory, Profile
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule

from .caching_allocator import peak_reserved
from .packing import Block
from .step_layout import MOST_BLOCKS, blocks_of


def is_reserved_known(profile: Profile) -> bool:
    """Whether the step was measured on a GPU: what stays on live bytes has no allocator."""
    return profile.device.kind == "cuda" and profile.memory is Memory.ALLOCATED and not profile.roofline


def reserved_peak(profile: Profile, problem: Problem, schedule: Schedule, *, is_expandable: bool) -> int | None:
    """Most reserved bytes of steps under ``schedule`` that begin with an empty cache and without the optimizer's state.
    None if there are more than ``MOST_BLOCKS``.
    """
    blocks = blocks_of(profile, problem, schedule)
    if len(blocks.of_step) > MOST_BLOCKS:
        return None
    sizes = [one.size_bytes for one in profile.values if one.kind is Kind.OPTIMIZER_STATE and one.born < 0]
    state = Counter(one for one in sizes if one)
    before = list[Block]()
    for block in blocks.before:
        if state[block.size_bytes] and block.end >= blocks.end:
            state[block.size_bytes] -= 1
        else:
            before.append(block)
    made = [Block(blocks.end, blocks.end, one) for one in sizes if one]
    peak = peak_reserved(before, blocks.of_step, blocks.end, made_by_first=made, is_expandable=is_expandable)
    return peak.reserved_bytes

"""Chunks of optimizer state in a plan, and what is wrong with those of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from .profile_parts import Bytes, Count, Index


class StateChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of one optimizer that are stepped together, and where their state is between steps.

    Exact meaning: ``docs/optimizer-state.md``.
    """

    optimizer: Index
    """Index into ``Profile.optimizers``."""
    first: Index
    """The first of its parameters, in the order of the groups."""
    count: Count
    """The number of its parameters."""
    size_bytes: Bytes
    """Bytes of their state that may leave the device."""
    streamed: bool = False
    """Whether that state is in the host tier between the optimizer's steps."""


def state_faults(chunks: Sequence[StateChunk]) -> Iterator[str]:
    """The chunks of an optimizer follow each other from its first parameter on, and some of them are streamed."""
    ends, moved = dict[int, int](), dict[int, bool]()
    for number, chunk in enumerate(chunks):
        where, first = f"state[{number}]", ends.get(chunk.optimizer, 0)
        if chunk.optimizer < max(ends, default=0):
            yield f"{where}.optimizer: expected the optimizers in order, found {chunk.optimizer} too late"
        if chunk.first != first:
            yield f"{where}.first: expected {first}, where the chunk before ends, found {chunk.first}"
        if chunk.count < 1 or chunk.size_bytes < 1:
            yield f"{where}: expected parameters with state, found {chunk.count} with {chunk.size_bytes} bytes"
        ends[chunk.optimizer] = chunk.first + chunk.count
        moved[chunk.optimizer] = moved.get(chunk.optimizer, False) or chunk.streamed
    for optimizer, is_moved in moved.items():
        if not is_moved:
            yield f"state: expected no chunks of optimizer {optimizer}, of which none is streamed, found some"

"""The PassProfile: what a forward pass without gradients takes, block by block, and its layout in one arena.

It is a file of its own, for a Profile says what a training step saves for backward, and here nothing is saved: there is
nothing to decide, and so neither link, handles nor points.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from poochplan.units import format_bytes, format_seconds

from .files import Document, numbered
from .profile_parts import Bytes, Count, Device, Host, Index, Input, ModelSignature, Offset, Seconds, Text

SCHEMA_VERSION = 1


class PassBlock(NamedTuple):
    """One block that the pass takes: bytes, and the events of its log between which it lives."""

    size_bytes: Bytes
    """As asked for."""
    start: Index
    """Position in the order of all that is taken and given back."""
    end: Index
    """The same; the length of that order where the pass does not give it back."""
    offset: Offset
    """In the arena; -1 outside."""
    layer: Text
    """The part of the model that was called last."""


class PassProfile(Document, frozen=True, kw_only=True):
    """One pass of a model in eval, without gradients.

    Blocks are rounded up to 512 bytes, and those of less than 64 count nothing. What the pass takes is that of its
    blocks, what it returns among them; ``static_bytes`` come on top.
    """

    heading: ClassVar[str] = "Forward pass of {}"
    kind: Literal["inference"] = "inference"
    schema_version: int = SCHEMA_VERSION
    workload: Text
    device: Device
    versions: dict[Text, Text]
    host: Host | None = None
    model: ModelSignature
    inputs: tuple[Input, ...]
    """``path dtype[shape]`` of each tensor that the model is called with."""
    calls: Count
    """Of the model in a step of the workload. The first is this pass."""
    pass_s: Seconds
    """Median, with the ordinary allocator."""
    spread_s: Seconds
    """Interquartile range."""
    iterations: Count
    static_bytes: dict[Text, Bytes]
    """What is there before: parameters, buffers, inputs."""
    live_peak_bytes: Bytes
    """Most bytes of tensors that the pass has made and that live at once."""
    allocated_peak_bytes: Bytes
    """The same with what ops take and give back inside."""
    total_bytes: Bytes
    """Sum of all blocks, each taken separately."""
    arena_bytes: Bytes
    """One arena for the blocks that the pass gives back and that have 4096 bytes or more."""
    arena_live_bytes: Bytes
    """Most of these that live at once: no arena is smaller."""
    separate_bytes: Bytes
    """Their sum."""
    outside_bytes: Bytes
    """Most of the other blocks that live at once."""
    caching_bytes: Bytes
    """What PyTorch's caching allocator would reserve for all blocks on a GPU, by the planner's model of it."""
    notes: tuple[Text, ...] = ()
    blocks: tuple[PassBlock, ...]

    def rows(self) -> dict[str, str]:
        """What ``pooch profile --inference`` and ``pooch show`` say."""
        static_bytes = sum(self.static_bytes.values())
        static = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.static_bytes.items() if size)
        taken_bytes = self.arena_bytes + self.outside_bytes
        return {
            "device": f"{self.device.name} ({self.device.kind}, {format_bytes(self.device.memory_bytes)})",
            "pass": f"{format_seconds(self.pass_s)} (spread {format_seconds(self.spread_s)}, "
            f"{self.iterations} iterations), in eval and without gradients",
            "there before": static or "nothing",
            "peak, with that": f"{format_bytes(static_bytes + self.allocated_peak_bytes)} allocated, "
            f"{format_bytes(static_bytes + self.live_peak_bytes)} live",
            "the pass takes at once": f"{format_bytes(self.allocated_peak_bytes)} allocated, "
            f"{format_bytes(self.live_peak_bytes)} live, in {len(self.blocks)} blocks",
            "one by one": f"{format_bytes(self.total_bytes)}, each block taken separately",
            "caching allocator": f"{format_bytes(self.caching_bytes)} reserved on a GPU, by a model of it",
            "arena": f"{format_bytes(self.arena_bytes)} ({_above(self.arena_bytes, self.arena_live_bytes)} above its "
            f"live peak); {format_bytes(taken_bytes)} with what lies outside",
            "saved by the arena": f"{_less(taken_bytes, self.caching_bytes)} of what the caching allocator reserves, "
            f"{_less(taken_bytes, self.total_bytes)} of the blocks one by one",
        } | numbered("note", self.notes)

    def data(self) -> dict[str, Any]:
        """The figures for ``--json``: all fields but blocks and model."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in found.items() if name not in ("blocks", "model")}

    def faults(self) -> Iterator[str]:
        for number, block in enumerate(self.blocks):
            where = f"blocks[{number}]"
            if block.start >= block.end:
                yield f"{where}: expected an end behind its start, found {block.start} and {block.end}"
            if block.offset >= 0 and block.offset + block.size_bytes > self.arena_bytes:
                yield (
                    f"{where}: expected a place within arena_bytes, {self.arena_bytes}, found "
                    f"{block.size_bytes} bytes at {block.offset}"
                )


def _above(size_bytes: int, least_bytes: int) -> str:
    return f"{size_bytes / least_bytes - 1:.1%}" if least_bytes else "nothing"


def _less(size_bytes: int, other_bytes: int) -> str:
    return f"{1 - size_bytes / other_bytes:.1%}" if other_bytes else "nothing"

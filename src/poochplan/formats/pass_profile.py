"""The PassProfile: the memory of an inference forward (*pass*), block by block, and its layout in one arena.

It is a separate file. A Profile describes what a training step saves for backward. A pass saves nothing, so there is
nothing to decide, and no link, handles or points.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

from poochplan.units import format_bytes, format_seconds

from .files import Document, numbered
from .profile_parts import Bytes, Count, Device, Host, Index, Input, Memory, ModelSignature, Offset, Seconds, Text

SCHEMA_VERSION = 1


class PassBlock(NamedTuple):
    """One block of the pass: its bytes, and the events of the log between which it lives."""

    size_bytes: Bytes
    """Bytes as requested."""
    start: Index
    """Position in the order of all allocations and releases."""
    end: Index
    """The same; the length of that order if the pass does not release the block."""
    offset: Offset
    """Offset in the arena; -1 outside."""
    layer: Text
    """The part of the model that was called last."""


class PassProfile(Document, frozen=True, kw_only=True):
    """One pass of a model in eval mode, without gradients.

    Blocks are rounded up to 512 bytes, and those of less than 64 bytes do not count. The pass's memory consists of its
    blocks, results included; ``static_bytes`` are additional.
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
    """Number of calls of the model in a step of the workload. The first one is this pass."""
    pass_s: Seconds
    """Median, with the ordinary allocator."""
    spread_s: Seconds
    """Interquartile range."""
    iterations: Count
    static_bytes: dict[Text, Bytes]
    """Memory from before the pass: parameters, buffers, inputs."""
    live_peak_bytes: Bytes
    """Most bytes of tensors made by the pass that live at once."""
    allocated_peak_bytes: Bytes
    """The same, including memory that ops take and give back inside."""
    total_bytes: Bytes
    """Sum of all blocks, each allocated separately."""
    arena_bytes: Bytes
    """Bytes of one arena for the blocks of 4096 bytes or more that the pass releases."""
    arena_live_bytes: Bytes
    """Most of these that live at once: no arena is smaller."""
    separate_bytes: Bytes
    """Sum of these."""
    outside_bytes: Bytes
    """Most bytes of the other blocks that live at once."""
    caching_bytes: Bytes
    """Bytes that PyTorch's caching allocator would reserve for all blocks on a GPU, by the planner's model of it."""
    notes: tuple[Text, ...] = ()
    blocks: tuple[PassBlock, ...]

    def rows(self) -> dict[str, str]:
        """The rows that ``pooch profile --inference`` and ``pooch show`` print."""
        static_bytes = sum(self.static_bytes.values())
        peak_text = Memory.ALLOCATED.peak_text
        static = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.static_bytes.items() if size)
        taken_bytes = self.arena_bytes + self.outside_bytes
        above = f"{self.arena_bytes / self.arena_live_bytes - 1:.1%}" if self.arena_live_bytes else "nothing"
        return {
            "device": f"{self.device.name} ({self.device.kind}, {format_bytes(self.device.memory_bytes)})",
            "pass": f"{format_seconds(self.pass_s)} (spread {format_seconds(self.spread_s)}, "
            f"{self.iterations} iterations), in eval and without gradients",
            "there before": static or "nothing",
            "peak, with that": peak_text(static_bytes + self.allocated_peak_bytes, static_bytes + self.live_peak_bytes),
            "the pass takes at once": f"{peak_text(self.allocated_peak_bytes, self.live_peak_bytes)}, in "
            f"{len(self.blocks)} blocks",
            "one by one": f"{format_bytes(self.total_bytes)}, each block taken separately",
            "caching allocator": f"{format_bytes(self.caching_bytes)} reserved on a GPU, by a model of it",
            "arena": f"{format_bytes(self.arena_bytes)} ({above} above its "
            f"live peak); {format_bytes(taken_bytes)} with what lies outside",
            "saved by the arena": f"{_less(taken_bytes, self.caching_bytes)} of what the caching allocator reserves, "
            f"{_less(taken_bytes, self.total_bytes)} of the blocks one by one",
        } | numbered("note", self.notes)

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


def _less(size_bytes: int, other_bytes: int) -> str:
    return f"{1 - size_bytes / other_bytes:.1%}" if other_bytes else "nothing"

"""What a plan promises, and how it was found."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from poochplan.units import format_seconds

from .profile_parts import Bytes, Change, Count, Memory, Seconds, Text


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The simulator's prediction for this plan."""

    peak_bytes: Bytes
    """Most bytes at any moment, from the second step on: live bytes, or allocated bytes if ``memory`` says so."""
    live_peak_bytes: Bytes | None = None
    """Most bytes of storages alone; None in files that lack it."""
    memory: Memory = Memory.LIVE
    """Which memory the peaks count."""
    first_step_peak_bytes: Bytes
    """The same in the first step, before the optimizer has state."""
    allocated_peak_bytes: Bytes | None = None
    """On a GPU, the most bytes in blocks of torch's allocator. A block of more than 1 MiB may be larger than requested
    by up to 1 MiB, unless segments are expandable. ``torch.cuda.max_memory_allocated`` returns at most this, unless
    ``max_split_size_mb`` or ``roundup_power2_divisions`` is set. None on the CPU."""
    reserved_peak_bytes: Bytes | None = None
    """On a GPU, the most bytes that torch's allocator takes from it, with expandable segments, by a model of it.
    None on the CPU, for profiles of live bytes and rooflines, and in files that lack it."""
    unexpanded_peak_bytes: Bytes | None = None
    """The same without expandable segments."""
    expands: bool = True
    """Which of both a budget on reserved bytes covers: whether segments expand, as the allocator is set."""
    in_core_peak_bytes: Bytes
    in_core_reserved_bytes: Bytes | None = None
    """What the in-core step reserves, as the allocator is set; None where no budget covers it."""
    in_core_step_s: Seconds
    """Seconds of the step by PyTorch alone. If that was not timed, the sum of the in-core step's ops."""
    is_timed_alone: bool = False
    """Whether ``in_core_step_s`` was timed by PyTorch alone."""
    kept_step_s: Seconds | None = None
    """Seconds of a session's step that keeps everything, with the runtime's own time: no plan's step is shorter. None
    in files that lack it."""
    step_s: Seconds
    """Predicted seconds of a step: ops, waits, replays, and the runtime's own use of the compute stream."""
    overhead: Change
    """``step_s / in_core_step_s - 1``."""
    stall_s: Seconds
    """Seconds the compute stream waits for copies."""
    replay_s: Seconds
    interference_s: Seconds
    """Seconds lost because compute runs slower beside copies."""
    runtime_s: Seconds = 0.0
    """The runtime's own part of ``step_s``: on the CPU its work for handles, swaps, recording and replays; on CUDA the
    compute stream's waits for launches by the thread."""
    state_s: Seconds = 0.0
    """Seconds by which streamed optimizer state makes the optimizer's ops longer."""
    out_bytes: Bytes
    in_bytes: Bytes
    host_bytes: Bytes
    """Of saved values on the host."""
    state_bytes: Bytes = 0
    """Of optimizer state on the host, which visits the device once in a step of its optimizer."""
    arena_bytes: Bytes | None = None
    """Bytes of one static arena for all that the step allocates itself; None if it was not computed."""
    arena_live_bytes: Bytes | None = None
    """Most of these bytes that are live at any moment: no arena is smaller."""
    arena_peak_bytes: Bytes | None = None
    """The arena and the most bytes outside it at any moment, with the memory that existed before the step."""

    def peak_of_step(self, has_arena: bool) -> int:
        """Most bytes of a step; if it uses an arena, this counts whole."""
        return max(self.peak_bytes, self.arena_peak_bytes or 0) if has_arena else self.peak_bytes

    def reserved_with(self, expand: bool | None) -> int | None:
        """Most reserved bytes, by whether segments expand; None if that, or they, are not known."""
        if expand is None:
            return None
        return self.reserved_peak_bytes if expand else self.unexpanded_peak_bytes

    def covered_bytes(self, on: Literal["allocated", "reserved"]) -> int:
        """Most bytes of what a budget covers, in the first step or a later one."""
        used_bytes = max(self.peak_bytes, self.first_step_peak_bytes)
        return self.reserved_with(self.expands) or used_bytes if on == "reserved" else used_bytes

    @property
    def in_core_text(self) -> str:
        """The reference time of the overhead, and how it was obtained."""
        seconds = format_seconds(self.in_core_step_s)
        return f"PyTorch alone {seconds}" if self.is_timed_alone else f"in-core ops {seconds}, PyTorch alone not timed"

    @property
    def peak_text(self) -> str:
        """The larger peak of the first and later steps. If allocated bytes are counted, the live peak too."""
        return self.memory.peak_text(max(self.peak_bytes, self.first_step_peak_bytes), self.live_peak_bytes)

    @property
    def causes_text(self) -> str:
        """The seconds that the overhead consists of."""
        runtime = f", the runtime itself {format_seconds(self.runtime_s)}" if self.runtime_s else ""
        state = f", optimizer state {format_seconds(self.state_s)}" if self.state_s else ""
        return (
            f"stall {format_seconds(self.stall_s)}, replay {format_seconds(self.replay_s)}, "
            f"interference {format_seconds(self.interference_s)}{state}{runtime}"
        )


class SolveStatus(StrEnum):
    """How the search for a plan ended."""

    WITHIN_GAP = "within gap"  # of the proven bound
    TIME_LIMIT = "time limit"
    EVALUATION_LIMIT = "evaluation limit"
    INTERRUPTED = "interrupted"  # by the user; the best plan so far
    SEARCHED = "searched"  # to the end, without any of these
    NOT_NEEDED = "not needed"  # one policy decided alone, or everything is kept


class Solve(msgspec.Struct, frozen=True, kw_only=True):
    """How the decisions were found."""

    policy: Text
    solver: Text
    status: SolveStatus
    objective_s: Change | None
    """Overhead in seconds by the fluid model; the prediction comes from the simulator."""
    bound_s: Seconds | None
    """Proven lower bound on the step time of any plan for this budget; None for a policy that proves none."""
    gap: Change | None
    """``step_s / bound_s - 1``."""
    wall_s: Seconds
    rounds: Count
    """Number of solved models: relaxed, tightened because the simulated peak exceeded the budget, or integral."""
    evaluations: Count | None = None
    """Number of simulations that the search was allowed, if this ended it; None for a time limit."""
    seed: int = 0
    """Seed of the search's random walks."""

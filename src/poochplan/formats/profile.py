"""The Profile: one training step, op by op and value by value, and the cost of the machine's link.

A profile contains nothing that exists only in eager mode: ops, values, and the points of the runtime's clock.
``profile_parts`` defines each of them, and ticks.

Links have names: the rates of transfer paths of that kind, for plans made away from the machine. The rates are those of
pinned copies in one direction, below the wire's nominal rate. PCIe 3, 4 and 5 x16 carry about three quarters to nine
tenths of their 15.8, 31.5 and 63 GB/s. The same holds for NVLink 1 between POWER8 and P100 (2 bricks, 40 GB/s), NVLink
2 between POWER9 and V100 (3 bricks, 75 GB/s) and NVLink-C2C of Grace Hopper (450 GB/s). A measured link is better than
any of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Literal

from poochplan.errors import UsageError, did_you_mean
from poochplan.units import format_bytes, format_rate, format_seconds, format_with_spread

from .files import beyond, numbered
from .occupancy import static_bytes
from .profile_data import ProfileData
from .profile_parts import ALLOCATION_UNIT_BYTES as ALLOCATION_UNIT_BYTES
from .profile_parts import ROOFLINE as ROOFLINE
from .profile_parts import SCHEMA_VERSION as SCHEMA_VERSION
from .profile_parts import Device as Device
from .profile_parts import Handle as Handle
from .profile_parts import Host as Host
from .profile_parts import Kind as Kind
from .profile_parts import LayerTimes as LayerTimes
from .profile_parts import Link as Link
from .profile_parts import LinkDirection as LinkDirection
from .profile_parts import Memory as Memory
from .profile_parts import ModelSignature as ModelSignature
from .profile_parts import Op as Op
from .profile_parts import OpBlock as OpBlock
from .profile_parts import Phase as Phase
from .profile_parts import Point as Point
from .profile_parts import PointKind as PointKind
from .profile_parts import RuntimeCost as RuntimeCost
from .profile_parts import StepFacts as StepFacts
from .profile_parts import StepTimes as StepTimes
from .profile_parts import Value as Value
from .queries import FRAMES, OUTSIDE, advice, movable_text, reconciliation

if TYPE_CHECKING:
    import pandas as pd

_OF_OPS = ("inputs", "outputs", "writes")
LEAST_SHOWN = 0.02
"""``rows`` leaves out the reconciliation of a phase's ops if its share of the phase is below this."""


class Profile(ProfileData, frozen=True, kw_only=True, dict=True):
    """One measured training step. ``profile_parts`` defines ticks."""

    newest: ClassVar[int] = SCHEMA_VERSION
    heading: ClassVar[str] = "Profile of {}"

    def to_frame(self, kind: Literal["layers", "ops", "values"]) -> pd.DataFrame:
        """The profile as a data frame (pandas). Columns, in bytes and seconds:

        * ``"layers"``: one row per layer with ops or saved values, most saved bytes first; the index is its path.
            ``saved_bytes`` and ``values`` (number): the layer's saved values; ``free_bytes``: those of them that are
            not pinned; ``forward_s`` and ``backward_s``: its ops; ``forward_median_s``, ``forward_spread_s``,
            ``backward_median_s`` and ``backward_spread_s``: median and interquartile range of the sum of its ops in
            a step, NaN if they were not timed in several steps; ``swap_s``: copying the free bytes out and back over
            the link, without overlap with compute; ``recompute_s``: the ops that write its free values, each once,
            NaN if one of the values cannot be recomputed or none is free; ``ratio``: swap over recompute;
            ``live_bytes``: the most that is live at one of its ops, forward or backward.
        * ``"ops"``: one row per op, in order. ``name``, ``layer``, ``phase``, ``tick``, ``duration_s``,
            ``spread_s``; ``inputs``, ``outputs`` and ``writes`` (values); ``born_bytes`` of the outputs,
            ``workspace_bytes``, ``live_bytes`` while it runs, with its outputs and workspace; ``random``,
            ``opaque``.
        * ``"values"``: one row per value. ``name``, ``layer``, ``kind``, ``size_bytes``, ``dtype``, ``shape``;
            ``born`` (op, or -1), ``forward_death`` and ``freed`` (ticks); ``saved``; ``swap_s``, ``recompute_s`` and
            ``ratio`` as above, NaN if a value cannot be swapped or recomputed; ``pinned`` and ``unreplayable``: the
            reasons.

        Raises ``UsageError`` for another kind.
        """
        if kind not in FRAMES:
            raise UsageError(f"to_frame: expected {', '.join(map(repr, FRAMES))}, found {kind!r}; name one of these")
        return FRAMES[kind](self)

    def reconciliation(self, least: float = 0.0) -> dict[str, str]:
        """How the seconds of the ops were reconciled with the uninstrumented step, in words by phase: the sum of the
        ops timed one by one, the seconds of the phase, and the treatment of the difference.

        Phases without ops, and those that differ by no more than the share ``least``, are left out. The result is
        empty if no step was timed.
        """
        return reconciliation(self, least)

    def advice(self) -> tuple[str, ...]:
        """What prevents plans from doing more, and what to do about it, one line each.

        Covers a compiled module that holds most of the saved bytes, activation checkpointing, eval mode, garbage in
        cycles, values that can be neither swapped nor recomputed, and failed measurements. Empty if there is
        nothing.
        """
        return tuple(advice(self))

    def rows(self) -> dict[str, str]:
        """The main figures in words: machine, times, peak, saved bytes, link, advice, notes."""
        times, link = self.times, self.link
        saved = [value for value in self.values if value.kind is Kind.ACTIVATION]
        free_bytes = sum(value.size_bytes for value in saved if not value.pinned)
        throttle = f", held to {format_rate(link.throttle_bytes_per_s)}" if link.throttle_bytes_per_s else ""
        ranks = f", while {link.ranks} ranks copy at once" if link.ranks > 1 else ""
        static = ", ".join(f"{name} {format_bytes(size)}" for name, size in static_bytes(self).items())
        peak = self.memory.peak_text(self.in_core_peak_bytes, self.in_core_live_peak_bytes)
        return {
            "device": f"{self.device.name} ({self.device.kind}, {format_bytes(self.device.memory_bytes)})",
            "mode": self.mode,
            "in-core step": f"{in_core_step_text(times)}, {times.iterations} iterations",
            "forward / backward / optimizer": " / ".join(
                format_with_spread(seconds, spread_s)
                for seconds, spread_s in (
                    (times.forward_s, times.forward_spread_s),
                    (times.backward_s, times.backward_spread_s),
                    (times.optimizer_s, times.optimizer_spread_s),
                )
            ),
            **{f"{phase} ops": text for phase, text in self.reconciliation(LEAST_SHOWN).items()},
            "in-core peak": f"{peak}, in {self.in_core_peak_layer or OUTSIDE}",
            "live all step long": static or "nothing",
            **({"may leave between steps": movable} if (movable := movable_text(self)) else {}),
            "saved for backward": f"{format_bytes(sum(value.size_bytes for value in saved))} in {len(saved)} values, "
            f"{format_bytes(free_bytes)} of it free to swap or recompute",
            "ops / values / points": f"{len(self.ops)} / {len(self.values)} / {len(self.points)}",
            f"link ({link.name})": f"out {format_rate(link.outward.bandwidth_bytes_per_s)}, "
            f"in {format_rate(link.inward.bandwidth_bytes_per_s)}{throttle}{ranks}",
            **numbered("advice", self.advice()),
            **numbered("assumed", self.assumed),
            **numbered("note", self.notes),
        }

    def faults(self) -> Iterator[str]:
        """Each fault between fields, in words: where, what was expected, what was found.

        A profile has tens of thousands of indices. Only the largest of each kind is checked, unless it is too large.
        """
        ops, values, points = self.ops, self.values, self.points
        lists = chain.from_iterable(map(attrgetter(*_OF_OPS), ops))
        if max(chain.from_iterable(lists), default=-1) >= len(values):
            for name in _OF_OPS:
                largest = [max(getattr(op, name), default=-1) for op in ops]
                yield from beyond(f"ops[{{}}].{name}", largest, len(values), "values")
        yield from beyond("values[{}].born", [value.born for value in values], len(ops), "ops")
        yield from beyond("values[{}].stretch_of", [value.stretch_of for value in values], len(values), "values")
        for number, optimizer in enumerate(self.optimizers):
            largest = [max(numbers, default=-1) for numbers in optimizer.parameters]
            yield from beyond(f"optimizers[{number}].parameters[{{}}]", largest, len(values), "values")
        yield from beyond("handles[{}].value", [handle.value for handle in self.handles], len(values), "values")
        yield from beyond("points[{}].handle", [point.handle for point in points], len(self.handles), "handles")
        yield from beyond("points[{}].op", [point.op for point in points], len(ops) + 1, "ops and one")
        for number, (before, point) in enumerate(pairwise(points), 1):
            if point.op < before.op:
                yield f"points[{number}].op: expected at least {before.op}, as of the point before, found {point.op}"
        yield from _blocks(self)


def in_core_step_text(times: StepTimes) -> str:
    """Seconds of the step by PyTorch alone, and of the timed steps that plans are made from."""
    timed = f"{format_seconds(times.step_s)} (spread {format_seconds(times.spread_s)})"
    if times.unserved_step_s is not None:
        timed += f" from one arena, {format_seconds(times.unserved_step_s)} without"
    if times.plain_step_s is None:
        return f"{timed}; not timed by PyTorch alone"
    return f"{format_seconds(times.plain_step_s)} by PyTorch alone; {timed}"


def _blocks(profile: ProfileData) -> Iterator[str]:
    for number, op in enumerate(profile.ops):
        if not op.blocks:
            continue
        for place, block in enumerate(op.blocks):
            where, last = f"ops[{number}].blocks[{place}]", len(op.blocks)
            if block.output >= len(op.outputs):
                yield f"{where}: expected one of {len(op.outputs)} outputs or -1, found output {block.output}"
            if block.until != -1 and not place < block.until <= last:
                yield f"{where}: expected until -1 or from {place + 1} to {last}, found {block.until}"


PRESET_BYTES_PER_S = {
    "pcie3": 12e9,
    "pcie4": 25e9,
    "pcie5": 55e9,
    "nvlink1": 33e9,
    "nvlink2": 65e9,
    "nvlink-c2c": 380e9,
}
"""Bytes per second of each link that has a name, in each direction."""
PRESET_LATENCY_S = 10e-6
"""Seconds before the first byte of a copy arrives: the launch and the trip."""


def preset_link(name: str) -> Link:
    """The link of that name: the same in both directions, full duplex, and without slowing compute.

    Raises ``UsageError`` with the list of names if the name is unknown.
    """
    if name not in PRESET_BYTES_PER_S:
        hint = did_you_mean(name, PRESET_BYTES_PER_S)
        raise UsageError(f"link: expected one of {', '.join(PRESET_BYTES_PER_S)}, found {name!r}{hint}")
    return rated_link(name, PRESET_BYTES_PER_S[name], PRESET_BYTES_PER_S[name])


def rated_link(name: str, *bytes_per_s: float) -> Link:
    """A link of two rates, out and in, with the presets' latency."""
    out, back = (LinkDirection(latency_s=PRESET_LATENCY_S, bandwidth_bytes_per_s=rate) for rate in bytes_per_s)
    return Link(name=name, outward=out, inward=back)

"""The mechanism: swaps saved values to the host and back, releases their storages, has them replayed (rules 3, 9).

It alone moves their storages; the engine drops one whose recipe is made. It decides nothing: callers ask it for one
value, or for all actions of a point.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from poochplan.errors import is_out_of_memory
from poochplan.formats.plan import Decision
from poochplan.runtime.devices.device import ComputeDevice, Stopwatch
from poochplan.runtime.devices.transfers import Transfers
from poochplan.runtime.replays.replay import Around, Content
from poochplan.runtime.replays.tape import Tape
from poochplan.runtime.run_report import StepReport
from poochplan.runtime.step_policies.step_policy import Actions

from .audit import Audit
from .cursor import StepEvents
from .host_tier import HostTier
from .saved_value import SavedValue, ValueState


def rebuild_together(value: SavedValue, mechanism: Mechanism) -> None:
    """One replay for the value and all recomputed values that it needs."""
    mechanism.run_replay(value)


Rebuild = Callable[[SavedValue, "Mechanism"], None]
"""Brings back a value that waits for a replay, and the values that the replay needs: by ``Mechanism.run_replay``.
Verification passes one of its own, which compares what comes back."""


class Mechanism:
    """State: the report of the step, to which it adds its counts; whether it times the compute stream (``timed``) by
    two events for each wait, where that stream is not the calling thread; and what runs replays (``rebuild``). Unless
    it is timed, or they are run otherwise, the compiled hooks carry out a plan's actions (``native/acts.h``).

    ``copy_failed`` is called with a value that the host could not take; the value stays on the device.
    """

    def __init__(
        self,
        device: ComputeDevice,
        host: HostTier,
        copy_failed: Callable[[SavedValue, OSError], None],
        audit: Audit,
        events: StepEvents,
        tape: Tape,
    ) -> None:
        self.report = StepReport()
        self.timed = self._is_short_of_ways = False
        self._stalls, self._replays = device.stopwatch(), device.stopwatch()
        self.device = device
        self.transfers = Transfers(device, tape.copies(device))
        self._host = host
        self.rebuild: Rebuild = rebuild_together
        self._copy_failed = copy_failed
        self._audit, self._events, self._tape = audit, events, tape

    def carry_out(self, actions: Actions) -> None:
        """Carries out the actions of a point, in order (rule 7)."""
        for value in actions.swap_out:
            self.swap_out(value)
        for value in actions.release:
            self.release(value)
        for value in actions.prefetch:
            self.prefetch(value)
        for value in actions.replay:
            self.replay(value)

    def swap_out(self, value: SavedValue) -> None:
        """Queues the value's copy to the host, if it is to be swapped and has no copy yet."""
        if value.state is not ValueState.ON_DEVICE or value.decision is not Decision.SWAP:
            return
        assert value.storage is not None
        offset = self._host.place(value)
        with self._named("swap out", value):
            value.is_copied(self.transfers.out(value.storage, offset), offset)
        self.report.out_bytes += value.size_bytes

    def release(self, value: SavedValue) -> None:
        """Waits for its copy and releases its storage. A value without a copy stays."""
        if value.state not in (ValueState.COPIED, ValueState.ARRIVING):
            return
        assert value.out_copy is not None
        with self._times(self._stalls):
            self.report.stall_s += value.out_copy.wait()  # Rule 3
        error = value.out_copy.error
        if error is not None:  # Rule 9
            offset = value.host_offset
            value.copy_has_failed()
            self._host.free_place(offset)  # last, because the place may then belong to another value
            self._copy_failed(value, error)
            return
        self.lets_go(value)
        value.is_released()

    def lets_go(self, value: SavedValue) -> None:
        """Its storage is about to be released."""
        self._audit.leaves(value)
        if value.storage is not None and value.beside is None:  # else what comes back is compared
            value.note = self._events.releases(value.storage) or 0

    def _is_intact(self, value: SavedValue) -> bool:
        """Whether its storage is found again as it was released."""
        note, value.note = value.note, 0
        found = self._events.finds(note, value.size_bytes) if note else None
        if found is not None:
            (value.came_back if value.waits_for_replay else value.came_from_host)(found)
            value.home = self.device.compute
        return found is not None

    def prefetch(self, value: SavedValue) -> None:
        """Queues its copy back, if only the host has it."""
        if value.state is not ValueState.ON_HOST or self._is_intact(value):
            return
        with self._named("prefetch", value):
            storage, copy = self.transfers.back(value.size_bytes, value.host_offset)
            value.is_fetched(storage, self.device.compute, copy)
        self.report.in_bytes += value.size_bytes

    def replay(self, value: SavedValue) -> None:
        """Has the value replayed, if it waits for a replay; :meth:`run_replay` runs one."""
        if value.state is not ValueState.TO_REPLAY or self._is_intact(value):
            return
        self._find_inputs(value)
        start_s = time.perf_counter()
        with self._times(self._replays), self._named("replay", value), self.device.replaying():
            self.rebuild(value, self)
        if self._replays is None:
            self.report.replay_s += time.perf_counter() - start_s

    def _find_inputs(self, value: SavedValue) -> None:
        """Values that a replay would bring back with this one are found again where that can be."""
        pending = [value]
        while pending:
            recipe = pending.pop().recipe
            inputs = [_saved(one) for one in recipe.values if one.waits_for_replay] if recipe is not None else ()
            pending += [one for one in inputs if one.note and not self._is_intact(one)]

    def run_replay(self, value: SavedValue, around: Around | None = None) -> list[SavedValue]:
        """One replay, within the block that ``around`` returns; brings back all values that it rebuilds."""
        resident = self.rescued if self._is_short_of_ways else self.resident
        back = [_saved(one) for one in self._tape.replay(value, lambda one: resident(_saved(one)), around)]
        for rebuilt in back:
            rebuilt.home = self.device.compute
        self.report.replayed_values += len(back)
        return back

    def resident(self, value: SavedValue) -> torch.UntypedStorage:
        """The value's device storage, filled. Waits for its copy, fetches it, or replays it."""
        if value.state is ValueState.TO_REPLAY:
            self.replay(value)
        elif value.state is ValueState.ON_HOST:
            self.prefetch(value)
        if value.state is ValueState.ARRIVING:
            with self._times(self._stalls):
                self.report.stall_s += value.arrived()
        if value.beside is not None:
            self._audit.comes_back(value)
        assert value.storage is not None
        if value.home is not None:
            self.device.use(value.storage, value.home)
        return value.storage

    def rescued(self, value: SavedValue) -> torch.UntypedStorage:
        """Like :meth:`resident`, after something of ours has failed: if that fails again, by the shortest way there is.

        Raises the error of the first way if the value is lost.
        """
        try:
            return self.resident(value)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._is_short_of_ways = True
            try:
                self._bring_back(value)
            except Exception:  # the value is lost, and the first error says why
                raise error from error.__cause__
        assert value.storage is not None
        return value.storage

    def _bring_back(self, value: SavedValue) -> None:
        """Replays the value, or reads it from the host on the calling thread, unless it is on the device."""
        if value.state is ValueState.TO_REPLAY:
            self.rebuild(value, self)
        elif value.state in (ValueState.ON_HOST, ValueState.ARRIVING):
            storage = self.device.allocate(value.size_bytes)
            self.device.read(storage, value.host_offset)
            value.came_from_host(storage)

    def take_times(self) -> None:
        """Adds the compute stream's times to the report, for waits that have ended; the others are added later."""
        if self._stalls is not None and self._replays is not None:
            self.report.stall_s += self._stalls.take()
            self.report.replay_s += self._replays.take()

    def _times(self, stopwatch: Stopwatch | None) -> contextlib.AbstractContextManager[None]:
        return stopwatch.running() if stopwatch is not None and self.timed else _NOTHING

    def _named(self, what: str, value: SavedValue) -> contextlib.AbstractContextManager[None]:
        return self.device.span(f"{what} {value.name}") if self.device.spans else _NOTHING


_NOTHING = contextlib.nullcontext()


def _saved(content: Content) -> SavedValue:
    assert isinstance(content, SavedValue)
    return content

"""PassArena: the blocks of a model's passes without gradients, from one arena in which an earlier pass was laid out."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Hashable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import msgspec
import torch

from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from poochplan.runtime.allocator.allocation_log import Table
from poochplan.runtime.allocator.arena import Fates
from poochplan.runtime.allocator.scope import ThreadScope
from poochplan.runtime.arena.known_steps import misses
from poochplan.runtime.arena.recorded_layout import Pack, recorded_blocks, recorded_layout
from poochplan.runtime.arena.served_runs import ServedRuns
from poochplan.runtime.attachment import is_in_session
from poochplan.runtime.run_report import arena_report
from poochplan.tensors.signatures import input_signature
from poochplan.torch_private.compiler_internals import is_tracing
from poochplan.torch_private.tensor_internals import in_backward

from .known_passes import Call, KnownPass, KnownPasses, PassLayout
from .model_calls import around_calls, around_parts
from .pass_report import PassReport

_here = threading.local()
"""``arena``: whose pass this thread is in."""
MOST_BLOCKS = 20_000
"""Passes with more have no layout."""


@functools.cache
def _scope() -> ThreadScope:
    """Of all passes that are written down, apart from that of training steps, which may have a log of its own."""
    return ThreadScope()


class PassArena:
    """A context manager, open from the start. States: *open*; *idle*, where nothing can be served and ``reason`` says
    why; *closed*.

    A pass begins at the outermost call of the model on a thread, without gradients, and ends where that returns or
    raises. One pass at a time: those of other threads meanwhile, and those inside a session, go to the ordinary
    allocator. So does what lies between passes. Of each kind of pass (inputs, switches) the first is ordinary, the
    second is logged and laid out, and those behind it are served; they are logged too until one is served as laid out.

    Bytes in use are never handed out: results that are kept stay as they are, whatever the passes do.

    Parameters
    ----------
    model: in whose calls passes begin; nothing of it changes but hooks.
    pack: lays out what a pass has taken.
    reason: why nothing is to be served; empty where it is.
    """

    def __init__(self, model: torch.nn.Module, pack: Pack, reason: str = "") -> None:
        self._model, self._pack, self._reason = model, pack, reason
        self._kinds = KnownPasses()
        self._runs: ServedRuns | None = None
        """From the first pass on, for it needs the allocator."""
        self._laid_out: PassLayout | None = None
        """That a pass was served by last."""
        self._is_closed = False
        self._passes = self._served = 0
        self._is_free = threading.Lock()
        """Held while a pass runs, on whichever thread."""
        self._pass = _Pass()
        self._stack = ExitStack()
        if not reason:
            with ExitStack() as stack:
                stack.enter_context(around_calls(model, self._call_begins, self._call_ends))
                stack.enter_context(around_parts(model, self._part_is_called))
                self._stack = stack.pop_all()

    def __enter__(self) -> PassArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Passes are ordinary from here on, and the hooks are gone. What lies in the arena stays as it is; its memory
        goes with the last tensor in it. Closing twice is no error.
        """
        self._is_closed = True
        self._stack.close()
        if self._runs is not None:
            self._runs.laid.close()

    def report(self) -> PassReport:
        """Of the last pass that was served, and the figures to compare it with."""
        arena, layout = self._runs.laid.arena if self._runs is not None else None, self._laid_out
        told = PassReport(
            passes=self._passes, served_passes=self._served, layouts=len(self._kinds), reason=self._reason
        )
        if arena is None or layout is None:
            return told
        served = msgspec.structs.asdict(arena_report(arena, arena.size_bytes, layout.layer))
        return msgspec.structs.replace(
            told,
            layout_bytes=layout.blocks.arena_bytes,
            separate_bytes=layout.blocks.separate_bytes,
            live_bytes=layout.blocks.live_bytes,
            **served,
        )

    # -- called by the model's hooks ---------------------------------------------------------------------------

    def _call_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        within: PassArena | None = getattr(_here, "arena", None)
        if within is not None and within._pass.is_running():
            within._pass.depth += within is self
            return
        if within is not None:  # an interrupt has ended it, of which torch tells no hook
            within._pass_ends(is_whole=False)
        if torch.is_grad_enabled() or self._reason or self._is_closed or in_backward() or is_tracing():
            return
        self._passes += 1
        if is_in_session(self._model) or not self._is_free.acquire(blocking=False):
            return
        _here.arena = self
        self._pass = _Pass(sys._getframe(2), (input_signature(args, kwargs), _switches(self._model)))
        self._serve(self._pass)

    def _call_ends(self, result: Any) -> None:
        if getattr(_here, "arena", None) is not self:
            return
        if self._pass.depth:
            self._pass.depth -= 1
            return
        self._pass_ends(is_whole=result is not None or sys.exc_info()[0] is None)

    def _part_is_called(self, path: str) -> None:
        if getattr(_here, "arena", None) is not self:
            return
        running = self._pass
        call = path, running.calls[path]
        running.calls[path] += 1
        if self._runs is None:
            return
        if running.served is not None and (point := running.served.points.get(call)) is not None:
            self._runs.serves_at(point)
        if running.is_logged:
            self._runs.marks(running.points.setdefault(call, len(running.points) + 1))

    # -- a pass ------------------------------------------------------------------------------------------------

    def _serve(self, running: _Pass) -> None:
        known = self._kinds.of(running.kind)
        known.passes += 1
        running.known = known
        if known.layout is None and not known.is_to_be_logged:
            return
        if self._runs is None:
            self._runs = ServedRuns(_scope())
        layout, most_bytes = known.layout, self._kinds.arena_bytes
        blocks = layout.blocks if layout is not None else None
        if self._runs.begin(blocks, largest_bytes=most_bytes, room_bytes=most_bytes, log=known.is_to_be_logged):
            running.served = self._laid_out = layout
            self._served += 1
        running.is_logged = self._runs.is_logged

    def _pass_ends(self, *, is_whole: bool) -> None:
        running, self._pass = self._pass, _Pass()
        _here.arena = None
        try:
            if self._runs is None or (running.served is None and not running.is_logged):
                return
            events, fates = self._runs.events(), self._runs.end()
            if is_whole and not self._is_closed and running.known is not None:
                self._learn(self._runs, running, running.known, fates, events)
        finally:
            self._is_free.release()

    def _learn(
        self, runs: ServedRuns, running: _Pass, known: KnownPass, fates: Fates | None, events: Table | None
    ) -> None:
        """What has not died when the pass ends lies outside: what it returns, and what somebody keeps."""
        if fates is not None:
            known.is_settled = not misses(fates)
        if events is None or known.is_settled:
            return
        known.times += 1
        blocks = recorded_blocks(events, LEAST_PLACED_BYTES)
        if len(blocks) > MOST_BLOCKS:
            return
        known.layout = PassLayout(recorded_layout(blocks, LEAST_PLACED_BYTES, self._pack), dict(running.points))
        self._kinds.is_laid_out(running.kind)
        arena = runs.laid.arena
        if arena is not None and arena.live_blocks:
            runs.laid.leave()  # somebody keeps what lies in it, so that its bytes are no places any more


class _Pass:
    """State of the pass that runs. One without a frame is none."""

    def __init__(self, frame: FrameType | None = None, kind: Hashable = None) -> None:
        self.frame, self.kind = frame, kind
        self.depth = 0
        """Calls of the model within it."""
        self.calls: Counter[str] = Counter()
        """Of its parts, so far."""
        self.points: dict[Call, int] = {}
        """Those that the log has marks of."""
        self.known: KnownPass | None = None
        self.served: PassLayout | None = None
        self.is_logged = False

    def is_running(self) -> bool:
        """Whether the call in which it began is one of those that led here, on its thread."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and (frame := frame.f_back) is not None:
            if frame is self.frame:
                return True
        return False


def _switches(model: torch.nn.Module) -> tuple[object, ...]:
    """What else decides which kernels run."""
    is_autocast = torch.is_autocast_enabled("cpu")
    return model.training, torch.is_inference_mode_enabled(), is_autocast and torch.get_autocast_dtype("cpu")

"""PassArena: allocates the blocks of inference forwards (*passes*) from one arena, by the layout of an earlier pass.

Passes are distinguished by the inputs of the model. Hooks report the calls of the model and of its parts.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import msgspec
import torch

from poochplan.errors import UsageError
from poochplan.formats.files import html_table, text_table
from poochplan.guard import Guard, guarded, stand
from poochplan.runtime.arena.library import Table, ThreadScope
from poochplan.runtime.arena.recorded_layout import ArenaRuns, PackBlocks, RecordedLayout, layout_of_run
from poochplan.runtime.messages import warn
from poochplan.tensors.modes import Begins, Ends, around_calls, compiled_modules, inside, left_out_of_copies
from poochplan.tensors.signatures import input_signature
from poochplan.torch_private.compiler_internals import is_tracing
from poochplan.torch_private.tensor_internals import in_backward
from poochplan.units import format_bytes

from ..open_sessions import is_in_session
from ..run_report import ArenaReport

_here = threading.local()
"""``arena``: the arena whose pass runs on this thread."""
MOST_LAYOUTS = 8
"""Number of layouts, for inputs that differ in shapes, types or switches. The one unused for longest is dropped."""
MOST_SEEN = 256
"""Kinds of inputs that are remembered without a layout."""
ORDINARY = 1
"""Passes of a kind before one is logged. The first one makes objects that stay, such as a kernel's own weights."""
FAILED = (
    "the arena stands aside, because something of ours has failed: {}; calls of the model are ordinary from here on, "
    "and every result is right; please report this line"
)
INTERRUPTED = "an interrupt has closed the arena; calls of the model are ordinary from here on"
_AT_ONCE = 3
"""A kind of pass is laid out so many times in a row. After that, only passes whose number is a power of two are."""


PartCall = tuple[str, int]
"""A part of the model by its path, and how often it has been called in the pass."""


@functools.cache
def _scope() -> ThreadScope:
    """The allocator's scope of all logged passes. Training steps have another one, and may have a log of their own."""
    return ThreadScope()


class PassArena:
    """A context manager, open from the start. States: *open*; *idle*, if there is a ``reason``; *closed*.

    A pass begins at the outermost call of the model on a thread, without gradients. It ends when that call returns or
    raises. One pass at a time uses the arena. Concurrent passes of other threads, passes inside a session, and code
    between passes use the ordinary allocator. Of each kind of pass (inputs, switches) the first is ordinary, the second
    is logged and laid out, and later ones are allocated from the arena. They are logged too until one fits exactly.

    Bytes in use are never handed out: results that are kept stay unchanged by later passes.

    Parameters
    ----------
    model: passes begin at its calls; only hooks are added to it.
    pack: computes the layout of the blocks of a pass.
    reason: why no pass uses an arena; empty if passes do.
    """

    def __init__(self, model: torch.nn.Module, pack: PackBlocks, reason: str = "") -> None:
        self._model, self._pack, self._reason = model, pack, reason
        self._kinds = KnownPasses()
        self._runs: ArenaRuns | None = None
        """Made at the first pass, because it needs the allocator."""
        self._laid_out: PassLayout | None = None
        """The layout of the last pass that used the arena."""
        self._is_closed = False
        self._passes = self._passes_in_arena = 0
        self._is_free = threading.Lock()
        """Held while a pass runs, on any thread."""
        self._pass = _Pass()
        self._stack = ExitStack()
        self._guard = Guard(self._failed)
        self._guard.asked_for = (UsageError,)
        if not reason:
            self._observe()

    def _observe(self) -> None:
        leave = stand(self._guard)
        try:
            with ExitStack() as stack:
                stack.enter_context(around_passes(self._model, self._call_begins, self._call_ends))
                stack.enter_context(around_parts(self._model, self._part_is_called))
                self._stack = stack.pop_all()
        except Exception as error:
            if not self._guard.takes(error):
                raise
        finally:
            leave()

    def __enter__(self) -> PassArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """From here on passes are ordinary. The arena's memory is freed with the last tensor in it. Idempotent."""
        self._is_closed = True
        try:
            self._stack.close()
            if self._runs is not None:
                self._runs.close_arena()
        except Exception as error:
            if not self._guard.takes(error):
                raise

    def _failed(self, why: str) -> None:
        """Something of ours has raised, perhaps amid a pass of this thread, which goes on with ordinary memory."""
        self._is_closed = True
        is_within = getattr(_here, "arena", None) is self
        if is_within:
            _here.arena = None
        with suppress(Exception):
            self._stack.close()
        if self._runs is not None and (is_within or self._is_free.acquire(blocking=False)):  # else another's pass runs
            with suppress(Exception):
                self._runs.close()
        with suppress(Exception):
            warn(FAILED.format(why) if why else INTERRUPTED)

    def report(self) -> PassReport:
        """A report on the last pass that used the arena, with the figures to compare it with."""
        arena, layout = self._runs.arena if self._runs is not None else None, self._laid_out
        told = PassReport(
            passes=self._passes, served_passes=self._passes_in_arena, layouts=len(self._kinds), reason=self._reason
        )
        if arena is None or layout is None:
            return told
        served = msgspec.structs.asdict(arena.report(arena.size_bytes, layout.layer))
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
        if within is not None:  # an interrupt has ended it, and torch calls no hook for that
            within._pass_ends(is_whole=False)
        if torch.is_grad_enabled() or self._reason or self._is_closed or in_backward() or is_tracing():
            return
        self._passes += 1
        if is_in_session(self._model) or not self._is_free.acquire(blocking=False):
            return
        _here.arena = self
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        switches = self._model.training, torch.is_inference_mode_enabled(), autocast  # they decide which kernels run
        self._pass = _Pass(_frame_of_call(), (input_signature(args, kwargs), switches))
        self._begin_pass(self._pass)

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
        if running.layout is not None and (point := running.layout.points.get(call)) is not None:
            self._runs.at(point)
        if running.is_logged:
            self._runs.marks(running.points.setdefault(call, len(running.points) + 1))

    # -- a pass ------------------------------------------------------------------------------------------------

    def _begin_pass(self, running: _Pass) -> None:
        known = self._kinds.of(running.kind)
        known.passes += 1
        running.known = known
        if known.layout is None and not known.is_to_be_logged:
            return
        if self._runs is None:
            self._runs = ArenaRuns(_scope())
        layout, most_bytes = known.layout, self._kinds.arena_bytes
        blocks = layout.blocks if layout is not None else None
        if self._runs.begin(blocks, largest_bytes=most_bytes, room_bytes=most_bytes, log=known.is_to_be_logged):
            running.layout = self._laid_out = layout
            self._passes_in_arena += 1
        running.is_logged = self._runs.is_logged

    def _pass_ends(self, *, is_whole: bool) -> None:
        running, self._pass = self._pass, _Pass()
        _here.arena = None
        try:
            if self._runs is None or (running.layout is None and not running.is_logged):
                return
            events, fates = self._runs.events(), self._runs.end()
            if is_whole and not self._is_closed and running.known is not None:
                self._learn(self._runs, running, running.known, fates, events)
        finally:
            self._is_free.release()

    def _learn(
        self, runs: ArenaRuns, running: _Pass, known: KnownPass, fates: ArenaReport | None, events: Table | None
    ) -> None:
        """Makes a layout. Blocks that outlive the pass lie outside: its results, and blocks that other code keeps."""
        if fates is not None:
            known.is_settled = not fates.missed
        if events is None or known.is_settled:
            return
        known.times += 1
        layout = layout_of_run(events, self._pack)
        if layout is None:
            return
        known.layout = PassLayout(layout, dict(running.points))
        self._kinds.is_laid_out(running.kind)
        arena = runs.arena
        if arena is not None and arena.live_blocks:
            runs.leave()  # other code keeps blocks in it, so their bytes cannot be places any more


def _frame_of_call() -> FrameType | None:
    """The frame that calls the model's hooks. Between them and this may be what hides them from the compiler."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != around_calls.__module__:
        frame = frame.f_back
    return frame and frame.f_back


@dataclass(eq=False)
class _Pass:
    """The state of the running pass. Without a frame there is no pass."""

    frame: FrameType | None = None
    kind: Hashable = None
    depth: int = 0
    """Depth of nested calls of the model."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of its parts so far."""
    points: dict[PartCall, int] = field(default_factory=dict)
    """The points that are marked in the log."""
    known: KnownPass | None = None
    layout: PassLayout | None = None
    is_logged: bool = False

    def is_running(self) -> bool:
        """Whether the call that began it is among the callers of this code, on its thread."""
        frame = _frame_of_call()
        while frame is not None and (frame := frame.f_back) is not None:
            if frame is self.frame:
                return True
        return False


@dataclass(frozen=True)
class PassLayout:
    """The places of the blocks of a pass, and its clock."""

    blocks: RecordedLayout
    points: Mapping[PartCall, int]
    """The clock at each call of a part, from 1 on, in order."""

    def layer(self, point: int) -> str:
        """The part that was called last; empty before the first call."""
        return next((path for (path, _), at in self.points.items() if at == point), "")


@dataclass
class KnownPass:
    """One kind of pass. States: *new*, without a layout; *laid out*; *settled*, if its last pass matched the layout."""

    passes: int = 0
    """Number of such passes that have begun."""
    times: int = 0
    """Number of times that one has been laid out."""
    layout: PassLayout | None = None
    is_settled: bool = False

    @property
    def is_to_be_logged(self) -> bool:
        """Whether the pass that has just begun is to be logged."""
        if self.is_settled or self.passes <= ORDINARY:
            return False
        return self.times < _AT_ONCE or self.passes & (self.passes - 1) == 0


class KnownPasses:
    """The knowledge about a limited number of kinds of passes, by kind."""

    def __init__(self) -> None:
        self._laid: OrderedDict[Hashable, KnownPass] = OrderedDict()
        self._seen: OrderedDict[Hashable, KnownPass] = OrderedDict()

    def of(self, kind: Hashable) -> KnownPass:
        if kind in self._laid:
            self._laid.move_to_end(kind)
            return self._laid[kind]
        known = self._seen.setdefault(kind, KnownPass())
        self._seen.move_to_end(kind)
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return known

    def is_laid_out(self, kind: Hashable) -> None:
        """The kind that :meth:`of` was last called with has a layout now."""
        if kind in self._seen:
            self._laid[kind] = self._seen.pop(kind)
            if len(self._laid) > MOST_LAYOUTS:
                self._laid.popitem(last=False)

    @property
    def arena_bytes(self) -> int:
        return max((one.layout.blocks.arena_bytes for one in self._laid.values() if one.layout is not None), default=0)

    def __len__(self) -> int:
        return len(self._laid)


class PassReport(ArenaReport, frozen=True, kw_only=True):
    """``arena.report()``: the last pass that used the arena, and the bytes of its blocks without an arena.

    ``size_bytes`` is the size of the arena, which has room for the largest layout so far. Prints as a table.
    """

    passes: int = 0
    """Passes without gradients since the arena was made."""
    served_passes: int = 0
    """The number of passes that had a layout."""
    layouts: int = 0
    """Number of kinds of inputs with a layout."""
    separate_bytes: int = 0
    """Sum of the blocks of that pass that have a place in the arena."""
    live_bytes: int = 0
    """The most bytes of them that are live at once: no arena is smaller."""
    layout_bytes: int = 0
    """The part of the arena that this pass uses."""
    reason: str = ""
    """Why no pass uses the arena at all; empty if passes do."""

    def __str__(self) -> str:
        return text_table(self._title(), self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._rows())

    def _title(self) -> str:
        return f"{self.served_passes} of {self.passes} passes served from an arena"

    def _rows(self) -> list[tuple[str, str]]:
        if self.reason:
            return [("not served", self.reason)]
        if not self.layouts:
            return [("not served", "no pass is laid out yet; each kind of inputs is, at its second pass")]
        kinds = "one kind" if self.layouts == 1 else f"{self.layouts} kinds"
        return [
            ("arena", f"{format_bytes(self.size_bytes)}, for {kinds} of inputs"),
            ("of it used by the last pass", format_bytes(self.layout_bytes)),
            ("its blocks at once", format_bytes(self.live_bytes)),
            ("its blocks one by one", format_bytes(self.separate_bytes)),
            ("served from it", f"{self.served} blocks, {format_bytes(self.served_bytes)}"),
            *(
                ("not served", f"{format_bytes(one.size_bytes)} in {one.layer or 'the model'}: {one.why}")
                for one in self.unserved
            ),
        ]


def around_passes(model: torch.nn.Module, begins: Begins, ends: Ends) -> AbstractContextManager[None]:
    """Like ``modes.around_calls``. Raises ``UsageError`` for a model whose kernels change if it has hooks."""
    if isinstance(model, torch.nn.TransformerEncoderLayer):
        raise UsageError(
            "model: expected one whose ops are the same with hooks, found torch.nn.TransformerEncoderLayer, "
            "which then leaves its fast path; give the module that it is a part of, or torch.nn.Sequential(layer)"
        )
    return around_calls(model, begins, ends)


@contextmanager
def around_parts(model: torch.nn.Module, called: Callable[[str], None]) -> Iterator[None]:
    """Within the block, calls ``called(path)`` before each call of a larger part of ``model``: its direct parts, and
    parts that have parts themselves.

    Compiled parts and TorchScript are left out. So are the layers of torch's transformer: hooks make them leave their
    fast path, and change their bits.
    """

    def telling(path: str) -> Callable[[torch.nn.Module, Any], None]:
        return guarded(lambda _, __: called(path))

    with ExitStack() as stack:
        for path, part in _larger_parts(model).items():
            stack.enter_context(left_out_of_copies(part.register_forward_pre_hook(telling(path))))
        yield


def _larger_parts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    closed = compiled_modules(model)
    found: dict[str, torch.nn.Module] = {}
    for path, part in model.named_modules():
        if inside(path, closed):
            continue
        if isinstance(part, torch.nn.TransformerEncoderLayer | torch.jit.ScriptModule):
            closed[path] = part
        elif path and ("." not in path or next(part.children(), None) is not None):
            found[path] = part
    return found

"""profile_pass: measures a workload's forward pass alone, in eval mode without gradients, and its blocks."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch

from poochplan.errors import StepError, UsageError
from poochplan.formats.pass_profile import PassBlock, PassProfile
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, LEAST_PLACED_BYTES, Kind, rounded_up
from poochplan.planner.arena.caching_allocator import peak_reserved
from poochplan.planner.arena.packing import LOOKS_PER_BLOCK, Block, live_peak, pack
from poochplan.profiler.assembly.assemble import this_host, this_machine, versions_here
from poochplan.runtime.applying import model_signature
from poochplan.runtime.arena.library import MARK, AllocationLog, ThreadScope, library, lifetimes
from poochplan.runtime.arena.pass_arena import around_parts, around_passes
from poochplan.tensors.modes import Begins, ToggledMode
from poochplan.tensors.signatures import input_signature, tensor_leaves
from poochplan.tensors.storages import memory_of, own_tensors, parts_of
from poochplan.torch_private.tensor_internals import storage_identity

_BEGINS, _ENDS = 1, 2
"""Marks before and after an op."""


def profile_pass(
    step: Callable[[], object],
    *,
    model: torch.nn.Module,
    workload: str = "",
    iterations: int = 5,
    warmup: int = 2,
    progress: Callable[[str], None] = lambda _: None,
) -> PassProfile:
    """Measures the first call of ``model`` in ``step()``. The model is in eval mode meanwhile, and restored afterwards.

    Parameters
    ----------
    step: calls the model; its result is not used.
    iterations, warmup: number of timed passes, and of passes before them.
    progress: called with a line of text at each stage.

    Raises
    ------
    UsageError
        The model is not on the CPU, or a hook on it would change its ops.
    StepError
        The step does not call the model.
    AllocatorError
        There is no compiled allocator, without which the blocks of a pass are not seen; one line says what to do.
    """
    _check_device(model)
    library()  # builds it before any timing
    with _evaluating(model):
        progress("timing passes")
        inputs, static_bytes, calls, seconds = _timed(step, model, iterations, warmup)
        progress("logging a pass")
        blocks, events = logged_pass(step, model)
        progress("logging a pass op by op")
        live_bytes = live_tensors_peak(step, model)
    progress("laying it out")
    offsets, figures = _laid_out(blocks, events)
    note = f"a step calls the model {calls} times; this is the first of them"
    return PassProfile(
        workload=workload,
        device=this_machine(torch.device("cpu")),
        versions=versions_here("cpu"),
        host=this_host(),
        model=model_signature(model),
        inputs=inputs,
        calls=calls,
        pass_s=statistics.median(seconds),
        spread_s=float(np.subtract(*np.quantile(seconds, (0.75, 0.25)))),
        iterations=iterations,
        static_bytes=static_bytes,
        live_peak_bytes=min(live_bytes, figures["allocated_peak_bytes"]),
        total_bytes=sum(rounded_up(block.size_bytes) for block in blocks),
        notes=() if calls == 1 else (note,),
        blocks=tuple(PassBlock(*block[:3], offset, block.layer) for block, offset in zip(blocks, offsets, strict=True)),
        **figures,
    )


def _timed(
    step: Callable[[], object], model: torch.nn.Module, iterations: int, warmup: int
) -> tuple[tuple[str, ...], dict[str, int], int, list[float]]:
    """The model's inputs, its static bytes, how often a step calls it, and the seconds of the first call in each."""
    inputs: tuple[str, ...] = ()
    static_bytes: dict[str, int] = {}
    seconds: list[float] = []
    began_s = 0.0

    def begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal began_s, inputs, static_bytes
        inputs, static_bytes = input_signature(args, kwargs), _static_bytes(model, args, kwargs)
        began_s = time.perf_counter()

    first = _FirstCall(begins, lambda: seconds.append(time.perf_counter() - began_s))
    with first.of(model):
        for _ in range(warmup + iterations):
            first.calls = 0
            step()
            if not first.calls:
                raise StepError(
                    "step(): expected a call of the model, found none; compute it with the model that is given, called "
                    "as model(x)"
                )
    return inputs, static_bytes, first.calls, seconds[warmup:]


def _static_bytes(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """Bytes of storages by kind. Each storage counts once, rounded up."""
    parameters, buffers = list(model.parameters()), list(own_tensors(model))
    inputs = [leaf for _, leaf in (*tensor_leaves("", args), *tensor_leaves("", kwargs))]
    known: set[int] = set()
    found: dict[str, int] = {}
    for kind, tensors in ((Kind.PARAMETER, parameters), (Kind.BUFFER, buffers), (Kind.INPUT, inputs)):
        found_parts = (memory_of(part) for one in tensors for part in parts_of(one))
        storages = {storage_identity(one): one.nbytes() for one in found_parts if one is not None}
        found[str(kind)] = sum(rounded_up(size) for key, size in storages.items() if key not in known)
        known |= storages.keys()
    return found


def _laid_out(blocks: list[PassBlock], events: int) -> tuple[list[int], dict[str, Any]]:
    """The offset of each block, -1 outside; and the figures of ``PassProfile``, by their names there."""
    inside = [i for i, block in enumerate(blocks) if block.end < events and block.size_bytes >= LEAST_PLACED_BYTES]
    spans = [Block(block.start, block.end, block.size_bytes) for block in blocks]
    packed = pack([spans[i] for i in inside], LOOKS_PER_BLOCK * len(inside))
    places = dict(zip(inside, packed.offsets, strict=True))
    return [places.get(i, OUTSIDE) for i in range(len(blocks))], {
        "allocated_peak_bytes": live_peak(spans),
        "arena_bytes": packed.arena_bytes,
        "arena_live_bytes": packed.lower_bound_bytes,
        "separate_bytes": sum(rounded_up(blocks[i].size_bytes) for i in inside),
        "outside_bytes": live_peak([span for i, span in enumerate(spans) if i not in places]),
        "caching_bytes": peak_reserved((), spans, events).reserved_bytes,
    }


def _check_device(model: torch.nn.Module) -> None:
    elsewhere = next((one.device for one in own_tensors(model) if one.device.type != "cpu"), None)
    if elsewhere is not None:
        raise UsageError(
            f"inference: expected a model on the CPU, found it on {elsewhere}, whose allocator takes no arena; "
            "profile the pass on the CPU"
        )


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """A block with the model in eval mode and without gradients. Each module is restored afterwards."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        stack.enter_context(torch.no_grad())
        yield


def logged_pass(step: Callable[[], object], model: torch.nn.Module) -> tuple[list[PassBlock], int]:
    """The blocks of the first call of ``model`` in ``step()``, without places, and the number of events in its log.

    Raises ``AllocatorError`` if there is no compiled allocator.
    """
    log, layers = AllocationLog(_scope()), [""]
    first = _FirstCall.logged(log)

    def called(path: str) -> None:
        if first.is_running:
            log.mark(len(layers))
            layers.append(path)

    with first.of(model), around_parts(model, called):
        step()
    found, events = lifetimes(log.events, LEAST_COUNTED_BYTES), len(log.events)
    return [
        PassBlock(size, birth, death if death >= 0 else events, OUTSIDE, layers[point])
        for size, point, birth, death in found.tolist()
    ], events


def live_tensors_peak(step: Callable[[], object], model: torch.nn.Module) -> int:
    """Most live bytes of the tensors made by the first call of ``model`` in ``step()``; not of blocks inside an op."""
    log = AllocationLog(_scope())
    first = _FirstCall.logged(log)
    mode = _Marking(first, log)
    with first.of(model):
        mode.switch_on()
        try:
            step()
        finally:
            mode.switch_off()
    found = lifetimes(log.events, LEAST_COUNTED_BYTES)
    marks = np.flatnonzero(log.events["kind"] == MARK)
    closing = marks[log.events["value"][marks] == _ENDS]
    following = np.append(closing, len(log.events))[np.searchsorted(closing, found["birth"])]
    is_inside = (found["point"] == _BEGINS) & (found["death"] >= 0) & (found["death"] < following)
    rows = found[~is_inside].tolist()
    return live_peak([Block(birth, death if death >= 0 else len(log.events), size) for size, _, birth, death in rows])


@functools.cache
def _scope() -> ThreadScope:
    return ThreadScope()


class _FirstCall:
    """Calls ``begins`` and ``ends`` around the first call of a model. State: how many calls have begun, and the depth
    of calls inside one.
    """

    def __init__(self, begins: Begins, ends: Callable[[], object]) -> None:
        self._begins, self._ends = begins, ends
        self.calls = self._depth = 0

    @classmethod
    def logged(cls, log: AllocationLog) -> _FirstCall:
        return cls(lambda *_: log.__enter__(), lambda: log.__exit__(None, None, None))

    def of(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return around_passes(model, self._call_begins, self._call_ends)

    @property
    def is_running(self) -> bool:
        return self.calls == 1 and self._depth > 0

    def _call_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        self.calls += self._depth == 1
        if self.calls == self._depth == 1:
            self._begins(args, kwargs)

    def _call_ends(self, _: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self.calls == 1:
            self._ends()


class _Marking(ToggledMode):
    """Writes marks before and after each op of the call."""

    def __init__(self, first: _FirstCall, log: AllocationLog) -> None:
        super().__init__()
        self._first, self._log = first, log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._first.is_running:
            return self.run_op(func, args, kwargs)
        self._log.mark(_BEGINS)
        try:
            return self.run_op(func, args, kwargs)
        finally:
            self._log.mark(_ENDS)

"""The parts of a profile that describe the machine and not the step: the link, and the runtime's own cost. Another
process measures them, so that a training loop does not stand still meanwhile.

The cost is the launching thread's CPU time for ops and for the runtime, on a small network, step against step. Hooks
are also timed on the profiled model itself if it fits: among a real step's ops the cache has less of their data.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import comb
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import nn

from poochplan.errors import SpillError
from poochplan.formats.files import cache_folder, encode_readable, not_kept, read_cache, write_cache
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Link, LinkDirection, Phase, PointKind, Profile, RuntimeCost
from poochplan.formats.profile_parts import Seconds
from poochplan.profiler.assembly.assemble import this_machine
from poochplan.profiler.capture.clock import clock_of, current
from poochplan.profiler.link import known_link, measure_link
from poochplan.profiler.live.after_capture import Hook, HookSeconds
from poochplan.profiler.live.capturing import Capturing
from poochplan.profiler.live.step_function import StepFunction
from poochplan.profiler.step.preserve import kept_generators, restored
from poochplan.runtime.devices.backend import backends_in_use
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.messages import warn_once
from poochplan.runtime.replays.compiled_tape import serves
from poochplan.runtime.step_policies.follow import AlwaysFollow
from poochplan.tensors.modes import uncompiled_hooks

from .compare import instructions_for, under

UNMEASURED = "unmeasured"
"""The name of a link that is still to be measured."""
_OWN = "call_s"
"""In ``unmeasured``, if only the costs of the step's own handles are known."""
VERSION = 9
"""Version of how costs are measured; files of other versions are measured anew."""
COLUMNS, LAYERS_OF_ONE_ROW, LAYERS, ROWS, DTYPE = 512, 100, 20, 63, torch.float64
"""Swapping is timed on a few values of 252 KiB. They are large enough that their pages return to the system, as those
of saved values do. Everything else is timed on many values of one row, which cost almost nothing themselves. No value
has as many elements as torch divides among threads: beside other work one thread waits for another."""
OPS_OF_A_LAYER = 2
_PAIRS = 4
"""Steps without the engine are short; the shortest of each kind counts."""
LEAST_ROUNDS, MOST_ROUNDS = 7, 21
"""With 7 samples, all above 0, the 95% interval of the median is above 0."""
SIGNIFICANCE = 0.05

T = TypeVar("T")


def on_worker_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` on another thread and returns its result; an exception is raised here. The calling thread waits.

    Torch's generators are restored afterwards, so random numbers that ``work`` draws do not change the loop's.
    """
    others = backends_in_use()
    kind = others[0].where.type if others else "cuda"
    with (
        torch.random.fork_rng([other.index for other in others], device_type=kind),
        ThreadPoolExecutor(1, thread_name_prefix="poochplan-worker") as pool,
    ):
        return pool.submit(work).result()


def with_cached_cost(profile: Profile, where: torch.device, steps: Sequence[HookSeconds] = ()) -> Profile:
    """The profile with the runtime's cost, which is measured now if this machine was never measured; ``steps`` kept
    every value.
    """
    return with_handles(profile, on_worker_thread(lambda: cached_cost(where)), steps)


def with_known_cost(profile: Profile, where: torch.device, steps: Sequence[HookSeconds]) -> Profile:
    """The profile with the runtime's cost, as far as this machine has been measured; ``steps`` kept every value."""
    own = RuntimeCost(handle_s=0.0, swap_s=0.0, record_s=0.0, unmeasured=(_OWN,))
    return with_handles(profile, known_cost(where) or Measured(own, 0.0), steps)


def unmeasured(throttle_bytes_per_s: float | None) -> Link:
    """Stands for a link that is limited to that rate."""
    anything = LinkDirection(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    return Link(name=UNMEASURED, outward=anything, inward=anything, throttle_bytes_per_s=throttle_bytes_per_s)


_measured_link = functools.cache(measure_link)
"""Measured once in a process, for all profiles."""


def is_complete(profile: Profile) -> bool:
    return profile.link.name != UNMEASURED and not _lacks_costs(profile)


def completed(profile: Profile, spill_dir: str | Path | None) -> Profile:
    """The profile with the link and the costs of this machine. Raises ``SpillError``."""
    where, throttle = torch.device(profile.device.kind), profile.link.throttle_bytes_per_s
    if profile.link.name == UNMEASURED:
        link = known_link(where, spill_dir, throttle) or _measured_link(where, spill_dir, throttle)
        profile = msgspec.structs.replace(profile, link=link)
    return _with_costs(profile, where) if _lacks_costs(profile) else profile


def _lacks_costs(profile: Profile) -> bool:
    return profile.runtime is not None and _OWN in profile.runtime.unmeasured


def _with_costs(profile: Profile, where: torch.device) -> Profile:
    """Handles as measured on the model itself, all other costs as on the small network."""
    measured, own = cached_cost(where), profile.runtime
    cost = None if measured is None else measured.cost
    if measured is not None and cost is not None and own is not None and own.handle_s:
        cost = msgspec.structs.replace(
            cost, handle_s=own.handle_s + measured.call_s, unpack_s=own.unpack_s + measured.call_s / 2
        )
    return msgspec.structs.replace(profile, runtime=cost)


class CachedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The file: costs, and seconds of calling two hooks, by machine, device, threads, versions and tape."""

    version: int
    costs: dict[str, tuple[RuntimeCost, Seconds]]


def cached_cost(where: torch.device) -> Measured | None:
    """The stored cost, else one that is measured now and stored; None if nothing could be measured.

    Measuring takes some seconds. Do not call it under other hooks or modes: they would be measured too.
    """
    found = known_cost(where)
    if found is not None:
        return found
    key = _key(where)
    measured, known = measured_on(where, key), _load()
    if measured is not None:
        costs = {**known, key: (measured.cost, measured.call_s)}
        kept = encode_readable(CachedCosts(version=VERSION, costs=costs))
        warn_once(not_kept(cache_folder(), write_cache(cache_folder() / "runtime-costs.json", kept)))
    return measured


def known_cost(where: torch.device) -> Measured | None:
    found = _load().get(_key(where))
    return None if found is None else Measured(*found)


def _key(where: torch.device) -> str:
    threads, tape = torch.get_num_threads(), ", compiled tape" if serves(where.type) else ""
    return f"{platform.node()}, {this_machine(where).name}, {threads} threads, {torch.__version__}{tape}"


def _load() -> dict[str, tuple[RuntimeCost, float]]:
    found = read_cache(cache_folder() / "runtime-costs.json", CachedCosts)
    return found.costs if found is not None and found.version == VERSION else {}


# -- the launching thread's time ---------------------------------------------------------------------------------------


def is_above_zero(samples: Sequence[float]) -> bool:
    """Whether the 95% interval of the median is above 0, by the sign test."""
    count, others = len(samples), sum(sample <= 0 for sample in samples)
    return 2 * sum(comb(count, index) for index in range(others + 1)) / 2**count < SIGNIFICANCE


def costs_of(a_round: Callable[[], Mapping[str, float]]) -> tuple[dict[str, float], tuple[str, ...]]:
    """The median of each cost over as many rounds as necessary, and the names of those that are still not distinguished
    from 0 and count as 0.

    The first round is discarded.
    """
    a_round()
    rounds: list[Mapping[str, float]] = []
    untold: list[str] = []
    while len(rounds) < MOST_ROUNDS:
        rounds.append(a_round())
        untold = [name for name in rounds[0] if not is_above_zero([one[name] for one in rounds])]
        if len(rounds) >= LEAST_ROUNDS and not untold:
            break
    medians = {name: median(one[name] for one in rounds) for name in rounds[0]}
    return medians | dict.fromkeys(untold, 0.0), tuple(untold)


class Chain(nn.Module):
    """Two ops, two handles and one value a layer. One of the ops writes in place, as in many networks."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        scales = [torch.ones(COLUMNS, dtype=DTYPE, device="cpu") for _ in range(layers)]
        self.scales = nn.ParameterList(map(nn.Parameter, scales))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            batch = torch.sigmoid_(batch * scale)  # not tanh: MKL divides that, too
        return batch


class Measured(NamedTuple):
    """The launching thread's times, measured on the small network."""

    cost: RuntimeCost
    call_s: float
    """The part of ``cost.handle_s`` for calling two hooks, however little they do."""


@functools.cache
def measured_on(where: torch.device, key: str) -> Measured | None:
    """The times measured once for a device and what else ``key`` names; None without a disk or memory to swap to."""
    measured = None
    with contextlib.suppress(SpillError, torch.OutOfMemoryError), restored(kept_generators()), current(where):
        measured = measure_runtime(where)
    gc.collect()  # the networks are in reference cycles with their engines, and would count as memory outside the step
    return measured


def with_handles(profile: Profile, measured: Measured | None, steps: Sequence[HookSeconds]) -> Profile:
    """The profile with what the runtime costs; ``steps`` kept every value under the engine."""
    if measured is None:
        return profile
    cost = measured.cost
    if steps and profile.handles:
        least, count = min(steps, key=lambda seconds: seconds.total_s), len(profile.handles)
        cost = msgspec.structs.replace(
            cost,
            handle_s=least.total_s / count + measured.call_s,
            unpack_s=least.unpack_s / count + measured.call_s / 2,
        )
    return msgspec.structs.replace(profile, runtime=cost)


# -- on the small network --------------------------------------------------------------------------


def measure_runtime(where: torch.device) -> Measured:
    """The measurement; raises ``SpillError``.

    It keeps torch's number of threads. ``torch.set_num_threads`` also changes how MKL divides products, also those of
    the training that goes on afterwards, and so their bits.
    """
    with contextlib.ExitStack() as stack:
        small, large = _Network(LAYERS_OF_ONE_ROW, 1, where), _Network(LAYERS, ROWS, where)
        keep, keep_recorded = (stack.enter_context(_planned(small, small.keep, record)) for record in (False, True))
        recompute = stack.enter_context(_planned(small, small.every_other, True))
        keep_large, swap = (
            stack.enter_context(_planned(large, wish, False))
            for wish in (large.keep, [Decision.SWAP] * len(large.keep))
        )

        def a_round() -> dict[str, float]:
            pairs = [(small.step(None), small.step(lambda tensor: tensor)) for _ in range(_PAIRS)]
            plain, called = (min(steps, key=lambda step: step.whole_s) for steps in zip(*pairs, strict=True))
            kept, recorded, recomputed = keep(), keep_recorded(), recompute()
            kept_large, swapped = keep_large(), swap()
            call_s = (called.whole_s - plain.whole_s) / small.handle_count
            op_s = plain.forward_s / small.forward_op_count
            drops_s, replays_s = (recomputed.pack_s - recorded.pack_s), (recomputed.unpack_s - recorded.unpack_s)
            if not small.is_ahead:  # the one thread takes them all
                drops_s, replays_s = 0.0, drops_s + replays_s
            back_s = (swapped.unpack_s - kept_large.unpack_s) / large.value_count
            out_s = (swapped.pack_s - kept_large.pack_s) / large.value_count
            return {
                "launch_s": plain.whole_s / small.op_count,
                "call_s": call_s,
                "handle_s": kept.total_s / small.handle_count + call_s,
                "unpack_s": kept.unpack_s / small.handle_count + call_s / 2,
                "swap_s": out_s + back_s,
                "fetch_s": back_s,
                "record_s": (recorded.outside_s - kept.outside_s) / small.recorded_op_count,
                "replay_s": replays_s / small.replayed_op_count - op_s,
            } | ({"drop_s": drops_s / small.dropped_count} if small.is_ahead else {})

        return measured_from(*costs_of(a_round), where.type)


def measured_from(found: dict[str, float], untold: tuple[str, ...], device_type: str) -> Measured:
    """The costs as a profile has them; ``untold`` names those that could not be distinguished from 0."""
    call_s = found["call_s"]
    cost = RuntimeCost(
        handle_s=found["handle_s"],
        swap_s=found["swap_s"],
        record_s=found["record_s"],
        drop_s=found.get("drop_s", 0.0),
        replay_s=found["replay_s"],
        launch_s=0.0 if device_type == "cpu" else found["launch_s"],  # on the CPU in the duration of each op
        unpack_s=min(found["unpack_s"], found["handle_s"]),
        fetch_s=min(found["fetch_s"], found["swap_s"]),
        unmeasured=tuple(name for name in untold if name != "call_s"),
    )
    return Measured(cost, call_s)


class _Seconds(HookSeconds):
    """Seconds of one step: in its hooks, and in total."""

    whole_s = forward_s = 0.0

    @property
    def outside_s(self) -> float:
        """Seconds of forward outside the pack hooks."""
        return self.forward_s - self.pack_s


class _Network:
    """A chain, its step, and the counts of its ops and values."""

    def __init__(self, layers: int, rows: int, where: torch.device) -> None:
        self.where, self.model = where, Chain(layers).to(where)
        self._batch = torch.full((rows, COLUMNS), 0.5, dtype=DTYPE, device=where)
        self._clock = clock_of(where)
        self.is_ahead = self._clock.is_ahead
        with StepFunction(self.forward, self.model, None, where) as steps:
            self.profile = steps.run(Capturing(steps.context)).untimed("run")
        forward = [op for op in self.profile.ops if op.phase is Phase.FORWARD]
        saves = [point.op for point in self.profile.points if point.kind is PointKind.SAVE]
        self.handle_count, self.value_count = len(self.profile.handles), len(saves)
        self.op_count, self.forward_op_count, self.recorded_op_count = len(self.profile.ops), len(forward), max(saves)
        self.keep = [Decision.KEEP] * self.value_count
        self.every_other = [Decision.RECOMPUTE if value % 2 else Decision.KEEP for value in range(self.value_count)]
        """Each replay is that of one layer, from the value before it."""
        self.dropped_count = self.every_other.count(Decision.RECOMPUTE)
        self.replayed_op_count = OPS_OF_A_LAYER * self.dropped_count

    def forward(self) -> torch.Tensor:
        self.model.zero_grad()
        return self.model(self._batch).sum()

    def run(self, seconds: _Seconds) -> None:
        """One timed step. The device's earlier work has ended, and its new work is not waited for."""
        self._clock.synchronize()
        start_s, forward_start_s = self._clock.processor_s(), time.thread_time()
        loss = self.forward()
        seconds.forward_s = time.thread_time() - forward_start_s
        loss.backward()
        seconds.whole_s = self._clock.processor_s() - start_s

    def step(self, hook: Hook | None) -> _Seconds:
        """A step without the engine, under this hook or none."""
        seconds, hooks = _Seconds(), contextlib.ExitStack()
        if hook is not None:
            hooks.enter_context(uncompiled_hooks(hook, hook))
        with hooks:
            self.run(seconds)
        return seconds


@contextlib.contextmanager
def _planned(network: _Network, decisions: list[Decision], record: bool) -> Iterator[Callable[[], _Seconds]]:
    """A call that runs the step under the engine."""
    model, device = network.model, open_device(network.where)
    instructions = msgspec.structs.replace(instructions_for(network.profile, decisions), record_from_start=record)
    try:
        engine = Engine(AlwaysFollow(instructions), device, model)
        pack, unpack = engine.planned.before(engine.pack, engine.unpack)

        def planned() -> _Seconds:
            seconds = _Seconds()
            with under(engine, model, seconds.timed("pack_s", pack), seconds.timed("unpack_s", unpack)):
                network.run(seconds)
            return seconds

        yield planned
    finally:
        device.close()

"""The parts of a profile that describe the machine and not the step: the link, and the runtime's own cost.

Another process measures them, so that a training loop does not stand still meanwhile.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from poochplan.formats.files import cache_folder, encode_readable, read_cache, write_cache
from poochplan.formats.profile import Link, LinkDirection, Profile, RuntimeCost
from poochplan.formats.profile_parts import Seconds
from poochplan.profiler.assembly.assemble import this_machine
from poochplan.profiler.link import known_link, measure_link
from poochplan.profiler.live.after_capture import HookSeconds

from .handle_cost import Measured, measured_on, with_handles

_ANY = LinkDirection(latency_s=0.0, bandwidth_bytes_per_s=1e9)
UNMEASURED = Link(name="unmeasured", outward=_ANY, inward=_ANY)
"""Stands for a link that is still to be measured."""
_OWN = "call_s"
"""In ``unmeasured``, if only the costs of the step's own handles are known."""
VERSION = 1
"""Version of how costs are measured; files of other versions are measured anew."""


T = TypeVar("T")


def on_worker_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` on another thread and returns its result; an exception is raised here. The calling thread waits.

    Torch's generators are restored afterwards, so random numbers that ``work`` draws do not change the loop's.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        torch.random.fork_rng(devices=gpus),
        ThreadPoolExecutor(1, thread_name_prefix="poochplan-worker") as pool,
    ):
        return pool.submit(work).result()


def with_cached_cost(profile: Profile, where: torch.device, steps: Sequence[HookSeconds]) -> Profile:
    """The profile with the runtime's cost, which is measured now if this machine was never measured."""
    return with_handles(profile, on_worker_thread(lambda: cached_cost(where)), steps)


def with_known_cost(profile: Profile, where: torch.device, steps: Sequence[HookSeconds]) -> Profile:
    """The profile with the runtime's cost, as far as this machine has been measured; ``steps`` kept every value."""
    own = RuntimeCost(handle_s=0.0, swap_s=0.0, record_s=0.0, unmeasured=(_OWN,))
    return with_handles(profile, known_cost(where) or Measured(own, 0.0), steps)


def unmeasured(throttle_bytes_per_s: float | None) -> Link:
    """Stands for a link that is limited to that rate."""
    return msgspec.structs.replace(UNMEASURED, throttle_bytes_per_s=throttle_bytes_per_s)


def is_complete(profile: Profile) -> bool:
    """Whether all facts of the machine have been measured."""
    return profile.link.name != UNMEASURED.name and not _lacks_costs(profile)


def completed(profile: Profile, spill_dir: str | Path | None) -> Profile:
    """The profile with the link and the costs of this machine. Raises ``SpillError``."""
    where, throttle = torch.device(profile.device.kind), profile.link.throttle_bytes_per_s
    if profile.link.name == UNMEASURED.name:
        link = known_link(where, spill_dir, throttle) or _measured_link(where, spill_dir, throttle)
        profile = msgspec.structs.replace(profile, link=link)
    return _with_costs(profile, where) if _lacks_costs(profile) else profile


@functools.cache
def _measured_link(where: torch.device, spill_dir: str | Path | None, throttle_bytes_per_s: float | None) -> Link:
    """Measured once in a process, for all profiles."""
    return measure_link(where, spill_dir, throttle_bytes_per_s)


def _lacks_costs(profile: Profile) -> bool:
    return profile.runtime is not None and _OWN in profile.runtime.unmeasured


def _with_costs(profile: Profile, where: torch.device) -> Profile:
    """Handles as measured on the model itself, all other costs as on the small network."""
    if profile.device.threads not in (None, torch.get_num_threads()):
        torch.set_num_threads(profile.device.threads)
    measured, own = cached_cost(where), profile.runtime
    cost = None if measured is None else measured.cost
    if measured is not None and cost is not None and own is not None and own.handle_s:
        cost = msgspec.structs.replace(
            cost, handle_s=own.handle_s + measured.call_s, unpack_s=own.unpack_s + measured.call_s / 2
        )
    return msgspec.structs.replace(profile, runtime=cost)


class CachedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The file: costs, and seconds of calling two hooks, by machine, device, threads and versions."""

    version: int
    costs: dict[str, tuple[RuntimeCost, Seconds]]


def cached_cost(where: torch.device) -> Measured | None:
    """The stored cost, else one that is measured now and stored; None if nothing could be measured.

    Measuring takes some seconds. Do not call it under other hooks or modes: they would be measured too.
    """
    found = known_cost(where)
    if found is not None:
        return found
    measured, key, known = measured_on(where, torch.get_num_threads()), _key(where), _load()
    if measured is not None:
        costs = {**known, key: (measured.cost, measured.call_s)}
        write_cache(_path(), encode_readable(CachedCosts(version=VERSION, costs=costs)))
    return measured


def known_cost(where: torch.device) -> Measured | None:
    """The stored cost; None if there is none."""
    found = _load().get(_key(where))
    return None if found is None else Measured(*found)


def _key(where: torch.device) -> str:
    threads = torch.get_num_threads()
    return f"{platform.node()}, {this_machine(where).name}, {threads} threads, {torch.__version__}"


def _path() -> Path:
    return cache_folder() / "runtime-costs.json"


def _load() -> dict[str, tuple[RuntimeCost, float]]:
    found = read_cache(_path(), CachedCosts)
    return found.costs if found is not None and found.version == VERSION else {}

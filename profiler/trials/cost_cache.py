"""What the launching thread takes on this machine, kept in the user's cache folder; what is wrong there is no error."""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec
import torch

from poochplan.formats.fields import Seconds
from poochplan.formats.files import cache_folder, encode_readable, read_cache, write_cache
from poochplan.formats.profile import RuntimeCost
from poochplan.profiler.assembly.assemble import this_machine

from .handle_cost import Measured, measured_on

VERSION = 1
"""Of the way costs are measured; files of another one are measured anew."""


class CachedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The file: costs, and seconds of calling two hooks, by machine, device, threads and versions."""

    version: int
    costs: dict[str, tuple[RuntimeCost, Seconds]]


def cached_cost(where: torch.device) -> Measured | None:
    """As it was measured here once, else measured now and kept; None where nothing could be measured.

    Takes some seconds then. Not under hooks or modes of anybody's: they would be measured too.
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
    """As it was measured here once; None where it was not."""
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

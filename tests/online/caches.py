"""The user's cache folder for tests of ``auto``: empty, but for what is compiled."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from poochplan.errors import NativeError
from poochplan.formats.files import cache_folder, encode_readable, write_cache
from poochplan.formats.profile import RuntimeCost
from poochplan.planner.simulator.evaluator import EVALUATOR, library
from poochplan.profiler.trials import machine_facts
from poochplan.runtime.arena.library import ALLOCATOR
from poochplan.runtime.replays.compiled_tape import TAPE


@contextmanager
def empty_cache(folder: Path) -> Iterator[None]:
    """Within the block caches lie in ``folder``: what is measured is measured once for all of the block."""
    (folder / "poochplan" / "native").mkdir(mode=0o700, parents=True)
    library(None)
    _build_allocator()
    for part in (EVALUATOR, ALLOCATOR, TAPE):
        if part.is_built():
            built = part.file().parent
            shutil.copytree(built, folder / "poochplan" / "native" / built.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


def costs_are_known() -> None:
    """As where the runtime's costs were measured before, which takes seconds: figures of no machine."""
    cost = RuntimeCost(handle_s=1e-5, swap_s=1e-4, record_s=5e-6, replay_s=5e-6, unpack_s=5e-6, fetch_s=5e-5)
    before, costs = torch.get_num_threads(), {}
    for threads in (1, before):
        torch.set_num_threads(threads)
        costs[machine_facts._key(torch.device("cpu"))] = (cost, 1e-6)
    known = machine_facts.CachedCosts(version=machine_facts.VERSION, costs=costs)
    write_cache(cache_folder() / "runtime-costs.json", encode_readable(known))


def _build_allocator() -> None:
    """Where it can be built."""
    with contextlib.suppress(NativeError):
        ALLOCATOR.build()

"""Where the profiler reaches into the runtime's engine: these places, and no new one."""

from __future__ import annotations

import importlib
import pkgutil

import poochplan.profiler
from poochplan.runtime.engine.engine import Engine

OVERRIDDEN = {
    "SwapAllEngine": {"_begin_clock", "_swap_soon"},
    "VerifyingEngine": {"_forget", "_replay", "_run_ops", "_diverge"},
}
"""Private methods of the engine that its subclasses in the package override."""


def subclasses(kind: type) -> list[type]:
    return [found for one in kind.__subclasses__() for found in (one, *subclasses(one))]


def private_overrides(kind: type) -> set[str]:
    return {
        name
        for name in vars(kind)
        if name.startswith("_") and not name.startswith("__") and any(name in vars(base) for base in kind.__mro__[1:])
    }


def test_the_profiler_overrides_these_private_methods_of_the_engine_and_no_other() -> None:
    for module in pkgutil.walk_packages(poochplan.profiler.__path__, "poochplan.profiler."):
        importlib.import_module(module.name)
    found = {
        kind.__name__: private_overrides(kind)
        for kind in subclasses(Engine)
        if kind.__module__.startswith("poochplan.")
    }
    assert found == OVERRIDDEN

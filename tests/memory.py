"""What a worker of the suite holds: it is told at the end, and what files of tests leave behind is given back."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

GIB = 1 << 30
MORE_BYTES = 200 << 20
"""How much more than after the last time a process holds before all its objects are looked at again."""


def held_bytes(what: str = "VmRSS") -> int:
    """Resident memory of this process now, or at most so far (``VmHWM``); 0 where there is no Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(what)), 0)


def forget(module: Any) -> None:
    """Empties what a file of tests remembers of its networks, which no other file asks for."""
    for thing in list(vars(module).values()):
        if (
            callable(clear := getattr(thing, "cache_clear", None))
            and getattr(thing, "__module__", "") == module.__name__
        ):
            clear()


class Memory:
    """A plugin of a process that runs tests. State: bytes held after the last look, and the test that took most."""

    def __init__(self) -> None:
        self._held_bytes = 0
        self._peak_bytes, self._largest = 0, ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        result = yield
        if (peak_bytes := held_bytes("VmHWM")) > self._peak_bytes + (10 << 20):
            self._peak_bytes, self._largest = peak_bytes, item.nodeid
        if isinstance(item, pytest.Function) and (nextitem is None or nextitem.path != item.path):
            forget(item.module)
        if held_bytes() > self._held_bytes + MORE_BYTES:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            trim()
            self._held_bytes = held_bytes()
        return result

    def told(self) -> str:
        return f"at most {held_bytes('VmHWM') / GIB:.1f} GiB resident, from {self._largest} on"


def trim() -> None:
    """The C library gives free pages back."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class Told:
    """A plugin of the process that prints. State: what each worker said."""

    def __init__(self, here: Memory) -> None:
        self._here = here
        self._lines: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._lines.append(f"{node.gateway.id}: {getattr(node, 'workeroutput', {}).get('memory', 'it died')}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self._lines or [f"this process: {self._here.told()}"]:
            terminalreporter.write_line(line)


def watch_memory(config: pytest.Config) -> None:
    """Registers what belongs to this process: a worker, or the one that starts them."""
    memory = Memory()
    if hasattr(config, "workeroutput"):
        config.pluginmanager.register(memory)
        config.pluginmanager.register(Handed(config, memory))
        return
    config.pluginmanager.register(Told(memory))
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.register(memory)


class Handed:
    """A plugin of a worker: hands what it says to the process that prints."""

    def __init__(self, config: Any, memory: Memory) -> None:
        self._output, self._memory = config.workeroutput, memory

    def pytest_sessionfinish(self) -> None:
        self._output["memory"] = self._memory.told()

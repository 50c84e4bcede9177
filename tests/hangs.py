"""A hang is a named failure with the stacks of all threads, and never a suite that does not end.

A test that takes too long is pytest's own business (``faulthandler_timeout`` in pyproject.toml): a thread of C, which
needs no lock of the interpreter, writes the stacks and ends the process. Under xdist that is one failed test, and the
others are run. What hangs between tests is ended here by the same means: a process that leaves one test and never comes
to the next, and a controller that never hears of a worker, as of one that died while a forked child keeps its pipes.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest

BETWEEN_TESTS_S = 2000
"""Longer than two tests that are ended themselves: of those another worker gives nothing away."""
WITHOUT_A_RESULT_S = 3000
"""Of the controller: workers end themselves before."""


class EndsWhatHangs:
    """A plugin. State: where stacks are written, which is not where the output of tests goes."""

    def __init__(self, *, is_controller: bool) -> None:
        self._is_controller = is_controller
        self._stderr = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
        self._wait()

    def _wait(self) -> None:
        after_s = WITHOUT_A_RESULT_S if self._is_controller else BETWEEN_TESTS_S
        faulthandler.dump_traceback_later(after_s, exit=True, file=self._stderr)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._wait()  # pytest has given up its own watch over the test

    def pytest_runtest_logreport(self) -> None:
        if self._is_controller:
            self._wait()


def pytest_configure(config: pytest.Config) -> None:
    """A hook, for a conftest to import: this module needs no torch."""
    config.pluginmanager.register(EndsWhatHangs(is_controller=config.getoption("dist", "no") != "no"))

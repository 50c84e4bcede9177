"""Garbage: values that nothing reaches any more and a reference cycle holds until Python's collector runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from .capture import Capture


@contextlib.contextmanager
def collected_after(capture: Capture) -> Iterator[None]:
    """A step without the collector, and one collection behind it: what of the captured step only that frees is noted.

    Around the captured step itself, and around the next one, which lets go of what the captured one has left in
    attributes. A collection in the middle of the captured step would move deaths.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        held = capture.lifetimes.held()
        gc.collect()
        capture.garbage |= held - capture.lifetimes.held()
    finally:
        if was_on:
            gc.enable()

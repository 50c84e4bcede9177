"""Fresh memory in a session on the CPU: what is freed goes back to the system, and large blocks ask for huge pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from poochplan.tensors.host_memory import freed_memory_given_back

from .library import is_loaded, library


@contextlib.contextmanager
def fresh_memory() -> Iterator[None]:
    """A block in which dropped tensors leave resident memory (:func:`freed_memory_given_back`), for the whole process.

    Each tensor of some megabytes is then fresh memory, up to half a step's time in small pages; so where the compiled
    allocator is in force it asks for huge ones, unless the kernel's setting is ``never``.
    """
    found = library() if is_loaded() else None
    with freed_memory_given_back():
        if found is not None:
            found.want_huge_pages(1)
        try:
            yield
        finally:
            if found is not None:
                found.want_huge_pages(-1)

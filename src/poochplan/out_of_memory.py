"""Recognises errors about missing memory of any library, and describes them in one line."""

from __future__ import annotations

import re

from .units import format_bytes

_WORDS = ("can't allocate memory", "not enough memory", "out of memory")
_ASKED = re.compile(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's and NumPy's ``MemoryError``, torch's on CUDA, and its plain
    ``RuntimeError`` of the CPU's allocator.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def asked_text(error: BaseException) -> str:
    """``"memory for 64.0 GiB"`` if the error gives the requested bytes, else ``"its memory"``."""
    match = _ASKED.search(str(error))
    if match is None:
        return "its memory"
    return f"memory for {match[2] or format_bytes(int(match[1]))}"

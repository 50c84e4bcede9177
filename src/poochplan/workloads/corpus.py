"""Text to learn from that comes with Python: nothing is downloaded. It may differ between versions of Python."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from poochplan.errors import UsageError

Text = Literal["reference", "small", "large"]
"""Which text: the language reference whole, its begin, or that and sources of the standard library behind it."""

TEXT_BYTES = {"small": 285_000, "large": 4_400_000}
"""As large as the two data sets of "Improving TensorFlow's Memory Swapping by Prioritizing Earlier Tensors", 2019."""
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"})


def text_of(name: Text) -> str:
    """The text of that name. Those of a stated size are ASCII, so that a byte is a character; others become ``?``.

    Raises
    ------
    UsageError
        Python was installed without its language reference, or without as much source as is asked for.
    """
    reference = _reference()
    size_bytes = TEXT_BYTES.get(name)
    if size_bytes is None:
        return reference
    parts, found_bytes = [reference], len(reference)
    for source in _sources() if found_bytes < size_bytes else ():
        parts.append(source)
        found_bytes += 1 + len(source)
        if found_bytes >= size_bytes:
            break
    text = "\n".join(parts)[:size_bytes].encode("ascii", "replace").decode("ascii")
    if len(text) < size_bytes:
        raise UsageError(
            f"text={name!r}: expected {size_bytes} characters of Python's own sources, found {len(text)}; install the "
            "full standard library, or take text='small'"
        )
    return text


def _reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise UsageError(
            "char_rnn reads pydoc_data.topics, which this Python was installed without; "
            "install the full standard library"
        ) from error
    return "\n".join(text for _, text in sorted(topics.items()))


def _sources() -> Iterator[str]:
    """Sources of the standard library without its tests, in the order of their paths."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(library).parts):
            yield path.read_text(encoding="utf-8", errors="replace")

"""Types of fields, with the range that each may have in a file.

What is out of range is refused where it is read, so that sums and quotients of what is left are numbers.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST_BYTES = 2**48
"""Bytes and elements are below this, 256 TiB: tens of thousands of them together are an int64."""
MOST_ITEMS = 2**31
"""Lengths of lists, places in them and ticks are below this."""
MOST_S = 1e9
"""Some thirty years."""

Bytes = Annotated[int, Meta(ge=0, lt=MOST_BYTES)]
Offset = Annotated[int, Meta(ge=-1, lt=MOST_BYTES)]
"""-1 for none."""
Unit = Annotated[int, Meta(ge=1, le=2**30)]
"""Bytes that others are rounded up to."""
Count = Annotated[int, Meta(ge=0, lt=MOST_ITEMS)]
Index = Annotated[int, Meta(ge=0, lt=MOST_ITEMS)]
IndexOrNone = Annotated[int, Meta(ge=-1, lt=MOST_ITEMS)]
"""-1 for none."""
Seconds = Annotated[float, Meta(ge=0, le=MOST_S)]
Rate = Annotated[float, Meta(ge=1, le=1e18)]
"""Bytes per second."""
Share = Annotated[float, Meta(gt=0, le=1)]
Factor = Annotated[float, Meta(ge=0, le=1e18)]
Change = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""A difference of seconds, or a ratio less 1."""

Text = Annotated[str, Meta(max_length=10_000)]
Shape = Annotated[tuple[Bytes, ...], Meta(max_length=64)]
"""No tensor has more dimensions."""
Input = Annotated[str, Meta(max_length=10_000, pattern=r"^[\s\S]* \w+\[(\d{1,16}(, \d{1,16})*)?\]$")]
"""``path dtype[shape]``."""

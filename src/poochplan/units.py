"""Bytes, rates and budgets, to and from text."""

from __future__ import annotations

import math
import re

from .errors import UsageError

_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _FACTORS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float, what: str = "size", *, least: int = 1) -> int:
    """Bytes of ``"8GiB"``, ``"800MB"``, ``4096`` or ``"4096"``.

    Raises ``UsageError`` unless it is a number of at least ``least``, with an optional unit B, KB..TB or KiB..TiB.
    """
    value = _quantity(str(text), _FACTORS)
    if value is None or value < least:
        raise UsageError(f"{what}: expected bytes such as 8GiB, 800MB or 4096, found {str(text)!r}")
    return int(value)


def parse_rate(text: str | int | float, what: str = "rate") -> float:
    """Bytes per second of ``"400MB/s"``, ``"12GB/s"`` or a plain number.

    Raises ``UsageError`` unless it is a positive number with an optional unit.
    """
    value = _quantity(str(text).removesuffix("/s"), _FACTORS)
    if value is None or value <= 0:
        raise UsageError(f"{what}: expected a rate such as 400MB/s or 12GB/s, found {str(text)!r}")
    return value


def parse_budget(text: str | int | float, in_core_peak_bytes: int) -> int:
    """Bytes of a budget, at least one: ``"60%"`` of the in-core peak, a share such as ``0.6``, ``"8GiB"`` or bytes.

    A number above 0 and up to 1 with a decimal point is a share; other numbers are bytes. Raises ``UsageError`` for
    text that is neither, for empty text, and for text of a plain number up to 100, which was meant as a share.
    """
    written = str(text).strip()
    number = _quantity(written, {"": 1})
    if isinstance(text, str) and number is not None and 1 <= number <= 100 and not re.fullmatch(r"1\.0*", written):
        raise UsageError(f"budget: expected 60%, 8GiB, 800MB or bytes, found {text!r}; did you mean {written}%?")
    if written.endswith("%"):
        share = _quantity(written[:-1], {"": 1})
        if share is not None and share > 0:
            return max(1, int(in_core_peak_bytes * share / 100))
    elif re.fullmatch(r"(0?\.[0-9]+|1\.0*)", written):
        if float(written) > 0:
            return max(1, int(in_core_peak_bytes * float(written)))
    else:
        value = _quantity(written, _FACTORS)
        if value is not None and value >= 1:
            return int(value)
    more = "; a budget is more than nothing" if _quantity(written.removesuffix("%"), _FACTORS) == 0 else ""
    raise UsageError(f"budget: expected 60%, 8GiB, 800MB or bytes, found {str(text)!r}{more}")


def memory_and_margin(memory: str | int, margin: str | int, names: tuple[str, str]) -> tuple[int, int]:
    """Bytes of a device's memory, and of its part that must stay free; ``names`` are theirs in messages.

    Raises ``UsageError`` if one is invalid, or nothing is left beside the margin.
    """
    memory_bytes, margin_bytes = parse_bytes(memory, names[0]), parse_bytes(margin, names[1], least=0)
    if margin_bytes >= memory_bytes:
        raise UsageError(
            f"{names[0]}: expected more than the margin of {format_bytes(margin_bytes)}, found "
            f"{format_bytes(memory_bytes)}; name more memory, or a smaller {names[1]}"
        )
    return memory_bytes, margin_bytes


def share_of_peak(size_bytes: float, in_core_peak_bytes: int) -> float:
    """The budget or peak as a share of the in-core peak, which counts as at least one byte."""
    return size_bytes / max(1, in_core_peak_bytes)


def format_bytes(size_bytes: float) -> str:
    """Text such as ``"1.25 GiB"``, three significant digits, for tables and messages."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    size = float(size_bytes)
    unit = "B"
    for next_unit in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, next_unit
    return f"{size:.{max(0, 2 - int(math.log10(size)))}f} {unit}"


def counted(count: int, what: str) -> str:
    """Such as ``1 step`` and ``2 steps``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Text such as ``"1.25 s"``, ``"37.2 ms"`` or ``"8.1 us"``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.3g} ns"


def format_with_spread(seconds: float, spread_s: float) -> str:
    """Text such as ``"37.2 ms ±0.4"``, with a spread above 0 in the same unit; ``"-"`` for no time."""
    if seconds == 0:
        return "-"
    text = format_seconds(seconds)
    if not spread_s > 0:
        return text
    factor = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[text.split()[1]]
    return f"{text} ±{spread_s / factor:.2g}"


def format_rate(bytes_per_s: float) -> str:
    """Text such as ``"1.3 GB/s"`` (decimal units, as links are sold)."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def format_copies(out_bytes: float, in_bytes: float) -> str:
    """Text such as ``"12.0 MiB out, 12.0 MiB in"``."""
    return f"{format_bytes(out_bytes)} out, {format_bytes(in_bytes)} in"


def _quantity(text: str, factors: dict[str, int]) -> float | None:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].upper() not in factors:
        return None
    value = float(match[1]) * factors[match[2].upper()]
    return value if math.isfinite(value) else None

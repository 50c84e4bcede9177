"""How long a search for a plan takes, and how near its step has to come to the proven bound."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from poochplan.errors import GapError, UsageError

from .base import at_least, positive

TIME_LIMIT_S = 20.0


def add_search_arguments(parser: argparse.ArgumentParser, *, is_counted: bool = True) -> None:
    """``--time-limit``, or ``--evaluations`` where searches may be counted; ``--gap`` and ``--max-gap``."""
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--time-limit", type=positive, default=TIME_LIMIT_S, metavar="S", help="seconds of each search (default: 20)"
    )
    if is_counted:
        end.add_argument(
            "--evaluations",
            type=at_least(1),
            metavar="N",
            help="simulations of each search in place of seconds: no clock decides, the same call makes the same plan",
        )
    parser.add_argument(
        "--gap",
        type=positive,
        default=0.005,
        help="stop when the step is within this share of its proven lower bound (default: 0.005, which is 0.5%%)",
    )
    parser.add_argument(
        "--max-gap",
        metavar="SHARE",
        help="exit code 4 where a step is not proven within this share, such as 1%%; what was found is written "
        "(default: any gap is success)",
    )


def most_gap(options: argparse.Namespace) -> float | None:
    """``--max-gap`` as a number; raises ``UsageError`` where it is no share."""
    return None if options.max_gap is None else parse_share(options.max_gap, "--max-gap")


def check_gaps(gaps: Sequence[float | None], most: float | None, written: str) -> None:
    """Raises ``GapError`` where a plan's gap is above ``most``; None is the gap of a plan without a proven bound."""
    missed = [gap for gap in gaps if most is not None and gap is not None and gap > most]
    if missed:
        raise GapError(
            f"--max-gap: expected steps within {most:.2%} of their proven bounds, found {max(missed):.2%} (in "
            f"{len(missed)} of {len(gaps)}); {written}; raise --time-limit, or --max-gap"
        )


def parse_share(text: str, what: str) -> float:
    """``0.3`` of ``"30%"`` or ``"0.3"``; raises ``UsageError`` for what is neither, and for ``"30"``."""
    is_percent = text.strip().endswith("%")
    try:
        share = float(text.strip().removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf") or (share >= 10 and not is_percent):
        raise UsageError(f"{what}: expected a share such as 30% or 0.3, found {text!r}")
    return share

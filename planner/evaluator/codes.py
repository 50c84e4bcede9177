"""Decisions and styles as the small integers that compiled code counts in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from poochplan.formats.plan import Decision
from poochplan.planner.judge.candidate import ON_DEMAND as ON_DEMAND_STYLE
from poochplan.planner.judge.candidate import STYLES
from poochplan.planner.problem.arrays import Bytes
from poochplan.planner.schedule.style import Style

KEEP: Final = 0
SWAP: Final = 1
RECOMPUTE: Final = 2
DECISIONS: Final = (Decision.KEEP, Decision.SWAP, Decision.RECOMPUTE)
"""The decision of each code."""

LATE: Final = 0
LATE_OUT_OF_ORDER: Final = 1
EARLY: Final = 2
ON_DEMAND: Final = 3
STYLE_OF: Final = (*STYLES, ON_DEMAND_STYLE)
"""The style of each code."""

NO_LANE: Final = 0
COMPUTING: Final = 1
AHEAD: Final = 2
"""Kinds of launching thread: none known, one that is the compute stream, one that works ahead of the device."""

_CODE_OF: Final = {decision: code for code, decision in enumerate(DECISIONS)}


def codes_of(decisions: Sequence[Decision]) -> Bytes:
    """Decisions as an array that the evaluator takes; int8, (values,)."""
    return np.array([_CODE_OF[decision] for decision in decisions], dtype=np.int8)


def decisions_of(codes: Bytes) -> tuple[Decision, ...]:
    """The decisions of such an array."""
    return tuple(DECISIONS[code] for code in codes.tolist())


def style_code(style: Style) -> int:
    """The code of one of the styles that the evaluator knows."""
    return STYLE_OF.index(style)

"""The two kinds of array that the planner counts in."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
"""Ticks, bytes, values."""
Floats: TypeAlias = NDArray[np.float64]
"""Seconds, and what solvers count in."""
Bytes: TypeAlias = NDArray[np.int8]
"""Codes of decisions."""
Flags: TypeAlias = NDArray[np.bool_]
"""Yes or no of each."""

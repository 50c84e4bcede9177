"""The line that a direction of the link is planned with, ``latency + bytes / bandwidth``, fitted to its curve.

A curve is often no line: small copies to a file go to the page cache at several times the rate of large ones. A fit of
all sizes by least squares then takes the rate of the small ones, which are many, for that of the large ones, which
carry the bytes. So the line is the one whose largest relative error over the sizes of real values is the smallest (the
ordinary Chebyshev fit), and where no line follows the curve, it may not be much too fast for large copies.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

from poochplan.formats.profile import LinkDirection

Curve = list[tuple[int, float]]
Floats = npt.NDArray[np.float64]
SMALL_BYTES = 1 << 20
"""Copies from here on count in full, shorter ones by their share of this: they carry few bytes."""
LARGE_BYTES = 64 << 20
"""Saved values of real steps are mostly no larger."""
LEAST_SHARE_LARGE, LEAST_SHARE_LARGEST = 0.8, 0.5
"""Of the measured seconds, the least that the line says at the largest size up to LARGE_BYTES, and at the largest."""
_SLOPE_FLOOR = 1e-3
"""Least share of the bytes in the seconds of the largest copy: a curve that falls still has a bandwidth."""
_TOLERANCE = 1e-9


def fit_line(curve: Curve) -> LinkDirection:
    """The line for a curve of (bytes, seconds), from small to large; exact where the curve is a line."""
    largest_bytes, longest_s = curve[-1]
    latency, slope = 0.0, 1.0
    if len(curve) > 1:
        sizes = np.array([size for size, _ in curve]) / largest_bytes
        seconds = np.array([second for _, second in curve]) / longest_s
        weights = np.minimum(1.0, sizes * largest_bytes / SMALL_BYTES)
        latency, slope = _least_error(sizes, seconds, weights, _last_up_to(curve, LARGE_BYTES))
    return LinkDirection(
        latency_s=latency * longest_s,
        bandwidth_bytes_per_s=largest_bytes / (slope * longest_s),
        curve=tuple(curve),
    )


def _last_up_to(curve: Curve, limit_bytes: int) -> int:
    return max((index for index, (size, _) in enumerate(curve) if size <= limit_bytes), default=len(curve) - 1)


def _least_error(sizes: Floats, seconds: Floats, weights: Floats, large: int) -> tuple[float, float]:
    """Latency and slope with the least ``error``, by trying every corner of what the rows leave open.

    ``weight * |line / seconds - 1| <= error`` at each size, the line no lower than its least shares, the latency not
    below 0: a linear program in three unknowns, whose optimum is where three rows meet.
    """
    line = np.stack([1 / seconds, sizes / seconds], axis=1)
    slack = 1 / weights
    rows = np.vstack(
        [
            np.column_stack([-line, slack]),
            np.column_stack([line, slack]),
            [[*line[large], 0.0], [*line[-1], 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        ]
    )
    least = np.array(
        [-1.0] * len(sizes) + [1.0] * len(sizes) + [LEAST_SHARE_LARGE, LEAST_SHARE_LARGEST, 0.0, _SLOPE_FLOOR]
    )
    triples = np.array(list(combinations(range(len(rows)), 3)))
    meet = np.abs(np.linalg.det(rows[triples])) > _TOLERANCE
    corners = np.linalg.solve(rows[triples[meet]], least[triples[meet], None])[..., 0]
    allowed = corners[(corners @ rows.T >= least - _TOLERANCE * np.abs(rows).max(axis=1)).all(axis=1)]
    latency, slope, _ = allowed[allowed[:, 2].argmin()]
    return float(latency) if latency > _TOLERANCE else 0.0, float(slope)

"""Sums over many columns that change little from row to row: each is the one before, and what enters or leaves.

So rows stay short, and building them takes time in proportion to what changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from poochplan.planner.model.fluid import FluidModel
from poochplan.planner.model.linear import Term


class Span(NamedTuple):
    """A term of the sums from ``start`` to before ``stop``; nothing where that is no later."""

    start: int
    stop: int
    column: int
    coefficient: float


FEW = 1000
"""PLAN of fewer values has its sums written out: its relaxation is rounded, and reads better without middlemen."""


def is_written_out(model: FluidModel) -> bool:
    """Whether each sum stands in full in its row."""
    return not model.is_bound and len(model.request.candidates) < FEW


def running_sums(model: FluidModel, count: int, spans: Iterable[Span]) -> list[list[Term]]:
    """For each of ``count`` places the sum of its terms, mostly as one column; empty where no term has come yet.

    A sum is between 0 and twice the bytes of all candidates.
    """
    entering: list[list[int]] = [[] for _ in range(count + 1)]
    leaving: list[list[int]] = [[] for _ in range(count + 1)]
    spans = [span for span in spans if span.start < span.stop]
    for index, span in enumerate(spans):
        entering[span.start].append(index)
        leaving[span.stop].append(index)
    if is_written_out(model):
        return _written_out(spans, entering, leaving)
    sums: list[list[Term]] = []
    before: int | None = None
    for enters, leaves in zip(entering[:count], leaving[:count], strict=True):
        if enters or leaves:
            now = model.linear.column(2 * model.all_bytes)
            terms: list[Term] = [(now, 1.0)] if before is None else [(now, 1.0), (before, -1.0)]
            terms += [(spans[index].column, -spans[index].coefficient) for index in enters]
            terms += [(spans[index].column, spans[index].coefficient) for index in leaves]
            model.linear.row(terms, low=0, high=0)
            before = now
        sums.append([] if before is None else [(before, 1.0)])
    return sums


def _written_out(spans: list[Span], entering: list[list[int]], leaving: list[list[int]]) -> list[list[Term]]:
    """The sums in the order of ``spans``."""
    active: set[int] = set()
    sums: list[list[Term]] = []
    for enters, leaves in zip(entering[:-1], leaving[:-1], strict=True):
        active.update(enters)
        active.difference_update(leaves)
        sums.append([(spans[index].column, spans[index].coefficient) for index in sorted(active)])
    return sums

"""What is known of the passes of a model, by the inputs that it is called with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from poochplan.runtime.arena.recorded_layout import RecordedLayout

MOST_LAYOUTS = 8
"""Of inputs that differ in shapes, types or switches; the one that was used longest ago goes."""
MOST_SEEN = 256
"""Kinds of inputs that are remembered without a layout."""
ORDINARY = 1
"""Passes of a kind before one is written down: the first makes what stays, such as a kernel's own weights."""
_AT_ONCE = 3
"""So many times a kind of pass is laid out in a row; behind them only at passes whose number is a power of two."""


Call = tuple[str, int]
"""A part of the model by its path, and how often it had been called in the pass."""


@dataclass(frozen=True)
class PassLayout:
    """Where the blocks of a pass lie, and what its clock is."""

    blocks: RecordedLayout
    points: Mapping[Call, int]
    """The clock at each call of a part: from 1 on, in order."""

    def layer(self, point: int) -> str:
        """The part that was called last; empty before the first."""
        return next((path for (path, _), at in self.points.items() if at == point), "")


@dataclass
class KnownPass:
    """What is known of one kind of pass. States: *new*, without a layout; *laid out*; *settled*, its last served pass
    was as laid out.
    """

    passes: int = 0
    """Such passes have begun."""
    times: int = 0
    """So often one has been laid out."""
    layout: PassLayout | None = None
    is_settled: bool = False

    @property
    def is_to_be_logged(self) -> bool:
        """Whether the pass that has just begun is written down."""
        if self.is_settled or self.passes <= ORDINARY:
            return False
        return self.times < _AT_ONCE or self.passes & (self.passes - 1) == 0


class KnownPasses:
    """What is known by kind of pass, of a limited number of them."""

    def __init__(self) -> None:
        self._laid: OrderedDict[Hashable, KnownPass] = OrderedDict()
        self._seen: OrderedDict[Hashable, KnownPass] = OrderedDict()

    def of(self, kind: Hashable) -> KnownPass:
        """That of a pass which begins."""
        if kind in self._laid:
            self._laid.move_to_end(kind)
            return self._laid[kind]
        known = self._seen.setdefault(kind, KnownPass())
        self._seen.move_to_end(kind)
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return known

    def is_laid_out(self, kind: Hashable) -> None:
        """The kind that :meth:`of` was asked for last has a layout now."""
        if kind in self._seen:
            self._laid[kind] = self._seen.pop(kind)
            if len(self._laid) > MOST_LAYOUTS:
                self._laid.popitem(last=False)

    @property
    def arena_bytes(self) -> int:
        """What the largest of the layouts needs."""
        return max((one.layout.blocks.arena_bytes for one in self._laid.values() if one.layout is not None), default=0)

    def __len__(self) -> int:
        """Layouts that there are."""
        return len(self._laid)

"""What became of the passes of a model that an arena serves."""

from __future__ import annotations

from poochplan.formats.shown_table import html_table, text_table
from poochplan.runtime.run_report import ArenaReport
from poochplan.units import format_bytes


class PassReport(ArenaReport, frozen=True, kw_only=True):
    """``arena.report()``: the last pass that the arena served, and the bytes of its blocks without an arena.

    ``size_bytes`` is the size of the arena, which has room for the largest layout so far. Prints as a table.
    """

    passes: int = 0
    """Passes without gradients since the arena was made."""
    served_passes: int = 0
    """The number of passes that had a layout."""
    layouts: int = 0
    """Number of kinds of inputs with a layout."""
    separate_bytes: int = 0
    """Sum of the blocks of that pass which have a place in the arena."""
    live_bytes: int = 0
    """The most of them that live at once: no arena is smaller."""
    layout_bytes: int = 0
    """The part of the arena that this pass uses."""
    reason: str = ""
    """Why no pass is served at all; empty if passes are served."""

    def __str__(self) -> str:
        return text_table(self._title(), self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._rows())

    def _title(self) -> str:
        return f"{self.served_passes} of {self.passes} passes served from an arena"

    def _rows(self) -> list[tuple[str, str]]:
        if self.reason:
            return [("not served", self.reason)]
        if not self.layouts:
            return [("not served", "no pass is laid out yet; each kind of inputs is, at its second pass")]
        kinds = "one kind" if self.layouts == 1 else f"{self.layouts} kinds"
        return [
            ("arena", f"{format_bytes(self.size_bytes)}, for {kinds} of inputs"),
            ("of it used by the last pass", format_bytes(self.layout_bytes)),
            ("its blocks at once", format_bytes(self.live_bytes)),
            ("its blocks one by one", format_bytes(self.separate_bytes)),
            ("served from it", f"{self.served} blocks, {format_bytes(self.served_bytes)}"),
            *(
                ("not served", f"{format_bytes(one.size_bytes)} in {one.layer or 'the model'}: {one.why}")
                for one in self.unserved
            ),
        ]

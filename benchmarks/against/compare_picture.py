"""The comparison as a picture: step time against peak, one panel for each network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .asking import KEPT, OURS
from .campaign import budget_bytes
from .rows import Found, changes_gradients

COLUMNS = 4
COLOURS = {
    OURS: "#c1121f",
    KEPT: "#f4a261",
    "checkpoint": "#1d3557",
    "sac": "#457b9d",
    "save-on-cpu": "#6a994e",
    "compile": "#8338ec",
    "compiled-checkpoint": "#2a9d8f",
    "graph": "#e07a9f",
}
OTHER = "#777777"


def draw(found: dict[str, Any], shares: list[str], path: Path) -> None:
    """Writes the picture; a cross is a method that changes gradients, a bar the 95% interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["network"] for row in found["rows"]))
    columns = min(COLUMNS, len(names))
    lines = -(-len(names) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4 * columns, 3.4 * lines), squeeze=False)
    for panel, name in zip(axes.flat, names, strict=False):
        rows = [row for row in found["rows"] if row["network"] == name and "time" in row]
        _panel(panel, name, rows, found["networks"].get(name), shares)
    for panel in list(axes.flat)[len(names) :]:
        panel.set_axis_off()
    handles = {
        label: handle for panel in axes.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=7, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.05 + 0.02 / lines, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(panel: Any, name: str, rows: list[Found], facts: Found | None, shares: list[str]) -> None:
    for row in sorted(rows, key=lambda row: (row["method"], row["peak_bytes"])):
        ratio = row["time"]["wall"]["median_ratio"]
        low, high = row["time"]["wall"]["interval_95"]
        kind = row["method"].split(":")[0]
        panel.errorbar(
            row["peak_bytes"] / row["in_core_peak_bytes"],
            ratio,
            yerr=[[max(0.0, ratio - low)], [max(0.0, high - ratio)]],
            fmt="x" if changes_gradients(row) else "o",
            color=COLOURS.get(kind, OTHER),
            label=kind,
            markersize=6,
            capsize=2,
            linewidth=1,
        )
    panel.axhline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
    for share in shares if facts else ():
        assert facts is not None
        at = budget_bytes(facts, share) / facts["profile_peak_bytes"]
        panel.axvline(at, color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
        panel.annotate(share, (at, 1), xycoords=("data", "axes fraction"), fontsize=7, ha="center", va="bottom")
    panel.set_title(name, fontsize=11, pad=12)
    panel.set_xlabel("peak / in-core peak", fontsize=9)
    panel.set_ylabel("step / in-core step", fontsize=9)
    panel.tick_params(labelsize=8)

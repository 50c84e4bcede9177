"""What the comparison over an epoch found, as the Markdown tables of ``benchmarks/README.md``."""

from __future__ import annotations

from typing import Any

from .recurrent_networks import OURS
from .simulated_links import POLICIES

MIB = 1 << 20
_NAMES = {OURS: "ours (`ilp`)"}
_MEASURED = (
    "| network | policy | epoch in-core, planned (s) | step over in-core, 95% | processor | predicted | peak, budget, "
    "in-core (MiB) | losses |\n|---|---|---|---|---|---|---|---|"
)
_SIMULATED = (
    "| network | in-core, budget (GiB) | link | earliest-first | latest-first | swap-all | seq2seq | ours | bound |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def tables(found: dict[str, Any]) -> str:
    """Both, what there is of them."""
    measured = [line for network in found["measured"] for line in measured_lines(network)]
    simulated = [line for network in found["simulated"] for line in simulated_lines(network)]
    parts = [[_MEASURED, *measured]] * bool(measured) + [[_SIMULATED, *simulated]] * bool(simulated)
    return "\n\n".join("\n".join(part) for part in parts)


def measured_lines(network: dict[str, Any]) -> list[str]:
    """A line for each policy."""
    return [_measured_line(network, row) for row in network["rows"]]


def _measured_line(network: dict[str, Any], row: dict[str, Any]) -> str:
    policy = _NAMES.get(row["policy"], row["policy"])
    if "refused" in row:
        return f"| {network['network']} | {policy} | | {row['refused']} | | | | |"
    times, wall, curve = row["epoch_s"], row["time"]["wall"], row["curve"]
    policy += ", from an arena" if row["allocator"] == "arena" else ""
    low, high = (value - 1 for value in wall["interval_95"])
    processor = row["time"]["cpu"]["median_ratio"] - 1
    bytes_shown = (curve["peak_bytes"], network["budget_bytes"], network["in_core"]["peak_bytes"])
    peaks = ", ".join(f"{size_bytes / MIB:.1f}" for size_bytes in bytes_shown)
    return (
        f"| {network['network']} | {policy} | {times['in_core']:.1f}, {times['planned']:.1f} "
        f"| **{wall['median_ratio'] - 1:+.1%}** [{low:+.1%}, {high:+.1%}] | {processor:+.1%} "
        f"| {row['predicted_ratio'] - 1:+.1%} | {peaks} | {_losses(curve)} |"
    )


def _losses(curve: dict[str, Any]) -> str:
    if not (curve["losses_equal"] and curve["end_equal"]):
        return "**differ**"
    return f"all {curve['steps']} equal to the bit"


def simulated_lines(network: dict[str, Any]) -> list[str]:
    """A line for each link and budget."""
    lines = []
    gib = 1024 * MIB
    for row in network["rows"]:
        shown = [_overhead(row["overheads"][name]) for name in (*POLICIES, "bound")]
        sizes = f"{network['in_core_peak_bytes'] / gib:.2f}, {row['budget_bytes'] / gib:.2f} ({row['share']:.0%})"
        cells = " | ".join((*shown[:-2], f"**{shown[-2]}**", shown[-1]))
        lines.append(f"| {network['network']} | {sizes} | {network['device']}, {row['link']} | {cells} |")
    return lines


def _overhead(value: float | None) -> str:
    return "none fits" if value is None else f"{value:.1%}"

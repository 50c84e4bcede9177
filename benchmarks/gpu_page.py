"""The results of ``gpu_suite.py`` as one page of markdown that a person can read."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.facts import Row, table_head, table_row
from poochplan.units import format_bytes, format_seconds

COLUMNS = (
    *("way", "step", "in-core", "overhead", "drift", "peak / predicted / budget"),
    *("allocated / reserved", "out / back", "waits", "fell back"),
)


def page(results: Row) -> str:
    """Device, versions and commit; what passed, failed and was left out; a table for each network."""
    return "\n".join([*_head(results), *_verdicts(results), *_profiles(results), *_tables(results)]) + "\n"


def _head(results: Row) -> Iterator[str]:
    device, versions = results["device"], results["versions"]
    yield f"# GPU suite on {device['name']}"
    yield ""
    facts = {name: value for name, value in device.items() if name not in ("kind", "name")}
    if "memory_bytes" in facts:
        facts["memory_bytes"] = format_bytes(facts["memory_bytes"])
    yield "* Device: " + ", ".join([device["kind"], *(f"{name} {value}" for name, value in facts.items())])
    yield "* Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"* Commit: {results['commit']} (a `+`: files differed from it)"
    yield f"* Took {format_seconds(results['took_s'])}" if "took_s" in results else "* Not ended"
    if results["arguments"].get("tiny"):
        yield "* **Tiny networks: the figures mean nothing.**"
    yield ""


def _verdicts(results: Row) -> Iterator[str]:
    yield "## What passed"
    yield ""
    for one in results["doctor"]:
        yield f"* Doctor, {one['name']}: {one['status']}: {one['found']}"
    tests = results["tests"]
    yield f"* Tests, on {tests['ran_on']}: {tests['summary'].strip('= ')}" if tests else "* Tests: not run"
    compared = [row for row in results["rows"] if "bitwise_equal" in row]
    for row in compared:
        verdict = "equal" if row["bitwise_equal"] else f"**different**: {row['difference']}"
        if row["bitwise_equal"] is None:
            verdict = "not checked, for this device has no numerics"
        yield f"* Bit by bit, {row['net']}, {row['way']}: {verdict} ({row['compared_tensors']} tensors)"
    over = [row for row in results["rows"] if (row.get("metered_peak_bytes") or 0) > row.get("predicted_peak_bytes", 0)]
    metered = [row for row in results["rows"] if row.get("metered_peak_bytes")]
    yield f"* Metered peak within the predicted one: {len(metered) - len(over)} of {len(metered)} plans"
    for one in results["failed"]:
        yield f"* **Failed**: {one['case']}: {one['error']}"
    for case in results["skipped"]:
        yield f"* Left out, the time was up: {case}"
    yield ""


def _profiles(results: Row) -> Iterator[str]:
    if not results["profiles"]:
        return
    yield "## Networks"
    yield ""
    yield table_head("network", "from", "step", "in-core peak", "smallest budget", "ops", "link out / in")
    for row in results["profiles"]:
        rates = [f"{format_bytes(row['link'][way])}/s" for way in ("out_bytes_per_s", "in_bytes_per_s")]
        sizes = (format_bytes(row[f"{name}_bytes"]) for name in ("in_core_peak", "smallest_budget"))
        yield table_row(row["net"], row["source"], format_seconds(row["step_s"]), *sizes, row["ops"], " / ".join(rates))
    yield ""


def _tables(results: Row) -> Iterator[str]:
    timed = [row for row in results["rows"] if "step_s" in row]
    for net in dict.fromkeys(row["net"] for row in timed):
        yield f"## {net}"
        yield ""
        yield table_head(*COLUMNS)
        yield from (table_row(*_cells(row)) for row in timed if row["net"] == net)
        yield ""
    yield "Overhead is step / in-core - 1. Drift is how much slower in-core steps were after than before: the noise."
    yield "Waits are those of compute for copies in the last step."


def _cells(row: Row) -> list[str]:
    def both(*names: str) -> str:
        return " / ".join("-" if row.get(name) is None else format_bytes(row[name]) for name in names)

    stall_s = row.get("stall_s")
    return [
        row["way"],
        f"{format_seconds(row['step_s'])} ± {format_seconds(row['spread_s'] / 2)}",
        format_seconds(row["in_core_step_s"]),
        f"{row['overhead']:+.1%}",
        f"{row['in_core_drift']:+.1%}",
        both("metered_peak_bytes", "predicted_peak_bytes", "budget_bytes"),
        both("allocated_bytes", "reserved_bytes"),
        both("out_bytes", "in_bytes"),
        "-" if stall_s is None else format_seconds(stall_s),
        str(row.get("fallbacks", "-")),
    ]

"""What one file says of itself: what it is for, where it was made, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pandas as pd

from poochplan.formats.passes.pass_profile import PassProfile
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import describe
from poochplan.formats.profile import Host, ModelSignature, Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.report.layer_table import decision_totals, decisions_by_layer
from poochplan.report.tables import Rows, overhead_text, plain_rows, plan_rows, profile_rows, swapped_text
from poochplan.units import format_bytes, format_seconds

from .run_record import RunRecord

UNKNOWN = "not written in this file"


def profile_file_rows(profile: Profile) -> Rows:
    """Of a profile."""
    return {
        "for": _model_text(profile.model),
        "inputs": describe(profile.inputs),
        **_made_rows(profile.versions, profile.host),
        **profile_rows(profile),
    }


def pass_file_rows(found: PassProfile) -> Rows:
    """Of a forward pass."""
    return {
        "for": _model_text(found.model),
        "inputs": describe(found.inputs),
        **_made_rows(found.versions, found.host),
        **found.rows(),
    }


def plan_file_rows(plan: Plan) -> Rows:
    """Of a plan."""
    moved = sum(1 for actions in plan.schedule if actions.swap_out or actions.prefetch or actions.replay)
    estimate = {"estimate": "its times were not measured on the device that it is for"} if plan.estimate else {}
    return {
        "for": f"{_model_text(plan.model)}, on {plan.device}",
        "inputs": describe(plan.inputs),
        **_made_rows(plan.versions, plan.host),
        **estimate,
        **plan_rows(plan),
        "points": f"{len(plan.values)} saves and {len(plan.uses)} uses; copies or replays begin at {moved}",
        "host tier": f"{format_bytes(plan.prediction.host_bytes)} of values",
    }


def run_file_rows(run: RunRecord) -> Rows:
    """Of a run."""
    is_over = run.measured_peak_bytes is not None and run.measured_peak_bytes > run.budget_bytes
    peak = "not metered" if run.measured_peak_bytes is None else format_bytes(run.measured_peak_bytes)
    equal = {None: "not checked", True: "yes", False: f"no: {run.difference}"}[run.bitwise_equal]
    rows = {
        "for": f"plan {run.plan_fingerprint}",
        **_made_rows(run.versions, run.host),
        "budget": format_bytes(run.budget_bytes),
        "measured peak": f"{peak}{' (OVER THE BUDGET)' if is_over else ''}, predicted "
        f"{format_bytes(run.predicted_peak_bytes)}",
        "planned step": f"{format_seconds(run.planned_step_s)} (predicted {format_seconds(run.predicted_step_s)})",
        "overhead": f"{overhead_text(run.measured_overhead)} (predicted {overhead_text(run.predicted_overhead)})",
        "bytes swapped": f"{swapped_text(run.out_bytes, run.in_bytes)} a step",
        "gradients bitwise equal": equal,
    }
    if run.served_arena_bytes is not None:
        rows["served from the arena"] = (
            f"{run.served_blocks} blocks, {format_bytes(run.served_bytes)} a step, from one arena of "
            f"{format_bytes(run.served_arena_bytes)}; {run.unserved_blocks} not as planned"
        )
    elif run.why_not_served:
        rows["served from the arena"] = f"nothing: {run.why_not_served}"
    if run.contradiction:
        rows["note"] = run.contradiction
    return rows | {f"fallback {number}": reason for number, reason in enumerate(run.fallback_reasons, 1)}


def set_frame(plans: Sequence[Plan]) -> pd.DataFrame:
    """One row per plan of a set; the index is its inputs."""
    rows = {
        describe(plan.inputs): {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": max(plan.prediction.peak_bytes, plan.prediction.first_step_peak_bytes),
            "step_s": plan.prediction.step_s,
            "overhead": overhead_text(plan.prediction.overhead),
        }
        for plan in plans
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("inputs")


def plan_file_data(plan: Plan) -> dict[str, Any]:
    """All that a plan's file says but points and values one by one; decisions by layer in bytes."""
    kept = _without(plan, "values", "handles", "uses", "schedule", "record_from_start", "layout")
    totals = {
        str(decision): {"values": int(row["values"]), "bytes": int(row["size_bytes"])}
        for decision, row in decision_totals(plan).iterrows()
    }
    return kept | {
        "fingerprint": plan.fingerprint,
        "decisions": totals,
        "layers": plain_rows(decisions_by_layer(plan)),
    }


def profile_file_data(profile: Profile) -> dict[str, Any]:
    """All that a profile's file says but ops, values and points one by one; its layers as in ``to_frame``."""
    kept = _without(profile, "ops", "values", "handles", "points", "layer_times")
    counts = {"ops": len(profile.ops), "values": len(profile.values), "points": len(profile.points)}
    return kept | {"counts": counts, "layers": plain_rows(profile.to_frame("layers"))}


def _without(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: msgspec.to_builtins(getattr(struct, name)) for name in struct.__struct_fields__ if name not in names
    }
    return fields


def _made_rows(versions: dict[str, str], host: Host | None) -> Rows:
    machine = UNKNOWN if host is None else f"{host.processor} ({host.system}, {host.cores} cores)"
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN,
        "host": machine,
    }


def _model_text(model: ModelSignature) -> str:
    first = model.tensors[0] if model.tensors else OUTSIDE
    return f"a model of {len(model.tensors)} parameters and buffers, the first {first}"

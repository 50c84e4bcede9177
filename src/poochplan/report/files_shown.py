"""The content of a file of any kind of this package: as rows of text, and as data for ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from poochplan.errors import InputFileError
from poochplan.formats.files import one_line, read_data
from poochplan.formats.pass_profile import PassProfile
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import describe
from poochplan.formats.profile import Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.formats.run_record import Certificate, RunRecord
from poochplan.units import format_bytes

from .tables import decisions_by_layer, plain_rows

UNKNOWN = "not written in this file"
Inspected = Profile | PassProfile | Plan | RunRecord | Certificate
KINDS: dict[str, type[Inspected]] = {
    "profile": Profile,
    "inference": PassProfile,
    "plan": Plan,
    "run": RunRecord,
    "certificate": Certificate,
}


class _Header(msgspec.Struct):
    kind: str = ""


def load_any(path: str | Path) -> Inspected:
    """The profile (of a step or of a forward pass), plan or run in the file.

    Raises ``UsageError`` if there is no such file, and ``InputFileError`` if it is none of these or is invalid.
    """
    missing = "no such file; name one that pooch profile, plan or run -o wrote"
    data = read_data(Path(path), "a profile, a plan or a run", missing)
    try:
        kind = msgspec.json.decode(data, type=_Header).kind
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputFileError(
            f"{path}: truncated or not JSON of this package ({one_line(error)}); expected a profile, a plan or a run"
        ) from None
    if kind not in KINDS:
        raise InputFileError(
            f"{path}: expected a file of pooch profile, pooch plan or pooch run -o, found "
            f"{f'kind {one_line(repr(kind))}' if kind else 'one that does not say its kind'}; name one of those"
        )
    return KINDS[kind].load(path)


def file_rows(found: Inspected) -> dict[str, str]:
    """The purpose of the file, its origin, and its figures."""
    if isinstance(found, RunRecord | Certificate):
        rows = {"for": f"plan {found.plan_fingerprint or 'none'}"}
    else:
        first = found.model.tensors[0] if found.model.tensors else OUTSIDE
        rows = {"for": f"a model of {len(found.model.tensors)} parameters and buffers, the first {first}"}
        rows["inputs"] = describe(found.inputs)
    host = found.host
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in found.versions.items()) or UNKNOWN
    rows["host"] = UNKNOWN if host is None else f"{host.processor} ({host.system}, {host.cores} cores)"
    if not isinstance(found, Plan):
        return rows | found.rows()
    rows["for"] += f", on {found.device}"
    if found.estimate:
        rows["estimate"] = "its times were not measured on the device that it is for"
    moved = sum(1 for actions in found.schedule if actions.swap_out or actions.prefetch or actions.replay)
    points = f"{len(found.values)} saves and {len(found.uses)} uses; copies or replays begin at {moved}"
    host_tier = f"{format_bytes(found.prediction.host_bytes)} of values"
    return rows | found.rows() | {"points": points, "host tier": host_tier}


def file_data(found: Inspected) -> dict[str, Any]:
    """The file's data without single ops, values, points and blocks; plans and profiles by layer, in bytes."""
    if isinstance(found, Plan):
        kept = _without(found, "values", "handles", "uses", "schedule", "record_from_start", "layout")
        layers = plain_rows(decisions_by_layer(found))
        return kept | {"fingerprint": found.fingerprint, "decisions": decision_data(found), "layers": layers}
    if isinstance(found, Profile):
        kept = _without(found, "ops", "values", "handles", "points", "layer_times")
        counts = {"ops": len(found.ops), "values": len(found.values), "points": len(found.points)}
        return kept | {"counts": counts, "layers": plain_rows(found.to_frame("layers"))}
    return found.data() if isinstance(found, PassProfile) else _without(found)


def decision_data(plan: Plan) -> dict[str, dict[str, int]]:
    """Number and bytes of the values of each decision."""
    return {str(one): {"values": len(sizes), "bytes": sum(sizes)} for one, sizes in plan.decided().items()}


def set_frame(plans: Sequence[Plan]) -> pd.DataFrame:
    """One row per plan of a set; the index is its inputs."""
    rows = {
        describe(plan.inputs): {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": max(plan.prediction.peak_bytes, plan.prediction.first_step_peak_bytes),
            "step_s": plan.prediction.step_s,
            "overhead": f"{plan.prediction.overhead:+.1%}",
        }
        for plan in plans
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("inputs")


def _without(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: msgspec.to_builtins(getattr(struct, name)) for name in struct.__struct_fields__ if name not in names
    }
    return fields

"""What is recomputed inside compiled graphs: decided on the profile of the graphs, with the compiled step's seconds.

Pure functions of profiles and plans.
"""

from __future__ import annotations

import msgspec

from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Phase, Profile
from poochplan.formats.queries import saved_values


def as_measured(graphs: Profile, measured: Profile) -> Profile:
    """The profile of the graphs, with the seconds of the measured step: each phase's ops keep their shares of it.

    Link, machine and what the runtime takes are the measured step's.
    """
    seconds = {Phase.FORWARD: measured.times.forward_s, Phase.BACKWARD: measured.times.backward_s}
    seconds[Phase.OPTIMIZER] = measured.times.optimizer_s
    told = dict.fromkeys(Phase, 0.0)
    for op in graphs.ops:
        told[op.phase] += op.duration_s
    scale = {phase: seconds[phase] / told[phase] if told[phase] > 0 else 1.0 for phase in Phase}
    return msgspec.structs.replace(
        graphs,
        ops=tuple(msgspec.structs.replace(op, duration_s=op.duration_s * scale[op.phase]) for op in graphs.ops),
        times=measured.times,
        link=measured.link,
        device=measured.device,
        runtime=measured.runtime,
        mode=measured.mode,
    )


def recomputed_nodes(profile: Profile, plan: Plan) -> tuple[str, ...]:
    """The nodes, as ``graph/node``, that save what the plan recomputes; sorted."""
    saves = saved_values(profile)
    nodes = (
        node
        for number, planned in zip(saves, plan.values, strict=True)
        if planned.decision is Decision.RECOMPUTE
        for node in profile.values[number].nodes
    )
    return tuple(sorted(set(nodes)))


def graph_budget(budget_bytes: int, graphs: Profile, measured: Profile) -> int:
    """The budget of the measured step, for the graphs' profile: as far below its own in-core peak."""
    return graphs.in_core_peak_bytes - (measured.in_core_peak_bytes - budget_bytes)


def beside_in_core(plan: Plan, stock: Profile) -> Plan:
    """The plan, whose prediction stands beside the in-core step of the model compiled without a plan; that of the code
    with replays in it recomputes as well.
    """
    step_s, in_core_s = plan.prediction.step_s, stock.times.step_s
    prediction = msgspec.structs.replace(
        plan.prediction,
        in_core_peak_bytes=stock.in_core_peak_bytes,
        in_core_step_s=in_core_s,
        overhead=step_s / in_core_s - 1 if in_core_s > 0 else 0.0,
    )
    return msgspec.structs.replace(plan, prediction=prediction)

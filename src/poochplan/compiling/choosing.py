"""What is recomputed inside compiled graphs: decided on the profile of the graphs, with the compiled step's seconds.

Pure functions of profiles and plans.
"""

from __future__ import annotations

import msgspec

from poochplan.formats.plan import Decision, Plan, Prediction
from poochplan.formats.profile import Phase, Profile
from poochplan.formats.queries import saved_values
from poochplan.units import format_bytes


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


def with_replays(plan: Plan, replays: tuple[str, ...], graphs: Profile) -> Plan:
    """The plan for code in which these nodes are recomputed, with a note of it."""
    if not replays:
        return plan
    wanted = set(replays)
    size_bytes = sum(value.size_bytes for value in graphs.values if wanted.intersection(value.nodes))
    note = f"{len(replays)} values ({format_bytes(size_bytes)}) are recomputed inside compiled graphs"
    return msgspec.structs.replace(plan, replays=replays, notes=(*plan.notes, note))


def without_replays(graphs: Profile) -> Profile:
    """The profile of the graphs, with nothing that may be recomputed."""
    why = "kernels that are fused otherwise gave other bits"
    values = (msgspec.structs.replace(one, unreplayable=one.unreplayable or why) for one in graphs.values)
    return msgspec.structs.replace(graphs, values=tuple(values))


def beside_in_core(plan: Plan, in_core: Profile, graphs: Prediction) -> Plan:
    """The plan, its prediction beside the step that is compiled as it is: its peak, and its seconds, which are those of
    the code with replays, everything kept, less the share that replays have by ``graphs``, the graphs' own prediction.

    Both codes are not timed in one run, and a machine is not as fast in one run as in the next.
    """
    promised = plan.prediction
    share = graphs.in_core_step_s / (graphs.in_core_step_s + graphs.replay_s) if graphs.replay_s else 1.0
    step_s = promised.in_core_step_s * share
    told = msgspec.structs.replace(
        promised,
        in_core_peak_bytes=in_core.in_core_peak_bytes,
        in_core_step_s=step_s,
        overhead=promised.step_s / step_s - 1 if step_s > 0 else 0.0,
        replay_s=promised.replay_s + promised.in_core_step_s - step_s,
    )
    return msgspec.structs.replace(plan, prediction=told)

"""Plans that nobody solved, for steps that the profiler runs under the runtime's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poochplan.formats.plan import Decision, Plan, PlannedValue, PointActions, Prediction, Solve, SolveStatus
from poochplan.formats.profile import Link, ModelSignature, PointKind, Profile
from poochplan.formats.queries import saved_values
from poochplan.runtime.engine.engine import Engine
from poochplan.tensors.modes import around_compiled, uncompiled_hooks


def trial_plan(
    kind: str,
    link: Link,
    model: ModelSignature,
    *,
    values: tuple[PlannedValue, ...] = (),
    handles: tuple[int, ...] = (),
    uses: tuple[int, ...] = (),
    schedule: tuple[PointActions, ...] = (),
) -> Plan:
    """A plan for the device ``kind`` that promises nothing; without values it plans nothing."""
    return Plan(
        workload="",
        profile_fingerprint="",
        budget_bytes=0,
        device=kind,  # type: ignore[arg-type]
        solve=Solve(
            policy="trial",
            solver="none",
            status=SolveStatus.NOT_NEEDED,
            objective_s=None,
            bound_s=None,
            gap=None,
            wall_s=0.0,
            rounds=0,
        ),
        prediction=Prediction(
            peak_bytes=0,
            first_step_peak_bytes=0,
            in_core_peak_bytes=0,
            in_core_step_s=0.0,
            step_s=0.0,
            overhead=0.0,
            stall_s=0.0,
            replay_s=0.0,
            interference_s=0.0,
            out_bytes=0,
            in_bytes=0,
            host_bytes=0,
        ),
        link=link,
        record_from_start=bool(values),
        model=model,
        values=values,
        handles=handles,
        uses=uses,
        schedule=schedule,
    )


def plan_of_decisions(profile: Profile, decisions: list[Decision]) -> Plan:
    """The plan that decides so on each saved value, in the order of first packs: what is swapped leaves when it is
    saved, and all comes back when it is first used.
    """
    saves = saved_values(profile)
    position = {value: index for index, value in enumerate(saves)}
    values = tuple(
        PlannedValue(
            name=profile.values[number].name,
            layer=profile.values[number].layer,
            decision=decision,
            size_bytes=profile.values[number].size_bytes,
            dtype=profile.values[number].dtype,
            shape=profile.values[number].shape,
        )
        for number, decision in zip(saves, decisions, strict=True)
    )
    swapped = [index for index, decision in enumerate(decisions) if decision is Decision.SWAP]
    return trial_plan(
        profile.device.kind,
        profile.link,
        profile.model,
        values=values,
        handles=tuple(position[handle.value] for handle in profile.handles),
        uses=tuple(point.handle for point in profile.points if point.kind is PointKind.USE),
        schedule=tuple(PointActions(at="save", index=index, swap_out=(index,), release=(index,)) for index in swapped),
    )


@contextlib.contextmanager
def under(
    engine: Engine, model: torch.nn.Module, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
) -> Iterator[None]:
    """The block is one step of the engine's; ``pack`` and ``unpack`` are its own, or call them."""

    def quietly(_: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            with engine.recorder.away():
                return call(*args, **kwargs)

        return quiet

    with around_compiled(model, quietly), uncompiled_hooks(pack, unpack):
        engine.begin_step()
        try:
            yield
        finally:
            engine.end_step()

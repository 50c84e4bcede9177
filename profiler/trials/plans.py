"""Instructions that nobody solved for, for steps that the profiler runs under the runtime's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poochplan.formats.plan import Decision, Instructions, PlannedValue, PointActions
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import PointKind
from poochplan.formats.queries import saved_values
from poochplan.runtime.attachment import AroundCall
from poochplan.runtime.compiled.deferred_unpack import deferring
from poochplan.runtime.engine.engine import Engine
from poochplan.tensors.modes import around_compiled, uncompiled_hooks


def instructions_for(profile: Profile, decisions: list[Decision]) -> Instructions:
    """Those that decide so on each saved value, in the order of first packs: what is swapped leaves when it is saved,
    and all comes back when it is first used. Recording is on throughout.
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
    return Instructions(
        record_from_start=bool(values),
        values=values,
        handles=tuple(position[handle.value] for handle in profile.handles),
        uses=tuple(point.handle for point in profile.points if point.kind is PointKind.USE),
        schedule=tuple(PointActions(at="save", index=index, swap_out=(index,), release=(index,)) for index in swapped),
    )


@contextlib.contextmanager
def under(
    engine: Engine,
    model: torch.nn.Module,
    pack: Callable[[Any], Any],
    unpack: Callable[[Any], Any],
    around_call: AroundCall = lambda _, call: call,
) -> Iterator[None]:
    """The block is one step of the engine's; ``pack`` and ``unpack`` are its own, or call them. ``around_call`` gives
    what is called in the place of a compiled callable.
    """

    def quietly(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        run = around_call(path, call)

        def quiet(*args: Any, **kwargs: Any) -> Any:
            with engine.quiet():
                return run(*args, **kwargs)

        return quiet

    hooks = deferring(pack, unpack, engine.may_wait, model, engine.device.kind)
    with around_compiled(model, quietly), uncompiled_hooks(*hooks):
        engine.begin()
        try:
            yield
        finally:
            engine.end()

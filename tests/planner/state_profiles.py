"""Steps with optimizers, of which the state may leave: added to a profile that has none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec

from poochplan.formats.occupancy import live_bytes
from poochplan.formats.profile import Kind, Op, Phase, PointKind, Profile, Value
from poochplan.formats.profile_parts import OptimizerState
from tests.planner.random_profiles import random_profile

MIB = 1 << 20


def with_adam(
    profile: Profile,
    *optimizers: Sequence[int],
    seconds: float = 3e-3,
    separable: bool = True,
    moments: int = 2,
    small: Sequence[int] = (),
) -> Profile:
    """The step with these optimizers behind it: of each the bytes of its parameters, as large as each of the moments.

    Each runs three ops over all its parameters, as foreach does; the second makes a temporary of each. The state of the
    parameters at the places in ``small`` may not leave.
    """
    last, end = profile.tick_count - 1, profile.tick_count + 3 * len(optimizers) - 1
    values = [_outliving(value, last, end) for value in profile.values]
    ops, made = list(profile.ops), list[OptimizerState]()
    for sizes in optimizers:
        state = [[_state(values, size, end) for _ in range(moments)] for size in sizes]
        every, first = [one for own in state for one in own], len(ops)
        ops.append(_op("aten._foreach_lerp_.Scalar", seconds / 3, every, writes=every))
        tick = last + 1 + (first - len(profile.ops))
        roots = [_temporary(values, size, first + 1, tick + 2) for size in sizes]
        ops.append(_op("aten._foreach_sqrt.default", seconds / 3, every, outputs=roots))
        ops.append(_op("aten._foreach_addcdiv_.ScalarList", seconds / 3, [*every, *roots]))
        parameters = tuple(() if place in small else tuple(own) for place, own in enumerate(state))
        made.append(OptimizerState(name="Adam", separable=separable, parameters=parameters))
    optimizer_s = seconds * len(optimizers)
    times = msgspec.structs.replace(profile.times, optimizer_s=optimizer_s, step_s=profile.times.step_s + optimizer_s)
    state_bytes = sum(value.size_bytes for value in values if value.kind is Kind.OPTIMIZER_STATE)
    found = msgspec.structs.replace(
        profile,
        ops=tuple(ops),
        values=tuple(values),
        times=times,
        optimizers=tuple(made),
        static_bytes=profile.static_bytes | {"optimizer_state": state_bytes},
    )
    return msgspec.structs.replace(found, in_core_peak_bytes=int(live_bytes(found).max()))


def bare(profile: Profile) -> Profile:
    """The step without the one op of its optimizer, and without the state of that."""
    last = profile.tick_count - 1
    values = [_outliving(value, last, last - 1) for value in profile.values if value.kind is not Kind.OPTIMIZER_STATE]
    found = msgspec.structs.replace(profile, ops=profile.ops[:-1], values=tuple(values))
    return msgspec.structs.replace(found, in_core_peak_bytes=int(live_bytes(found).max()))


def random_step(seed: int, op_count: int) -> Profile:
    """A random step that saves something, of which the values are about as large as chunks, with Adam behind it."""
    drawn = (random_profile(seed + 1_000_003 * turn, op_count) for turn in itertools.count())
    profile = next(one for one in drawn if any(point.kind is PointKind.USE for point in one.points))
    return random_adam(scaled(profile, 4096), seed)


def random_adam(profile: Profile, seed: int, unit_bytes: int = 16 * MIB) -> Profile:
    """The step with one or two such optimizers, of parameters of about that size."""
    rng = random.Random(seed)
    sizes = [
        [int(unit_bytes * rng.uniform(0.2, 1.5)) for _ in range(rng.randint(1, 5))]
        for _ in range(rng.choice([1, 1, 2]))
    ]
    small = [0] if rng.random() < 0.2 else []
    return with_adam(
        profile,
        *sizes,
        seconds=rng.choice([1e-4, 1e-2]),
        separable=rng.random() < 0.85,
        moments=rng.randint(1, 2),
        small=small,
    )


def _outliving(value: Value, last: int, end: int) -> Value:
    death, freed = (end if tick == last else tick for tick in (value.forward_death, value.freed))
    return msgspec.structs.replace(value, forward_death=death, freed=freed)


def _state(values: list[Value], size_bytes: int, end: int) -> int:
    return _value(values, Kind.OPTIMIZER_STATE, size_bytes, -1, end)


def _temporary(values: list[Value], size_bytes: int, op: int, last_tick: int) -> int:
    return _value(values, Kind.TEMPORARY, size_bytes, op, last_tick)


def _value(values: list[Value], kind: Kind, size_bytes: int, born: int, last_tick: int) -> int:
    values.append(
        Value(
            name=f"{kind.value}{len(values)}",
            layer="",
            kind=kind,
            size_bytes=size_bytes,
            dtype="uint8",
            shape=(size_bytes,),
            born=born,
            forward_death=last_tick,
            freed=last_tick,
        )
    )
    return len(values) - 1


def _op(
    name: str, seconds: float, reads: Sequence[int], *, outputs: Sequence[int] = (), writes: Sequence[int] = ()
) -> Op:
    return Op(
        name=name,
        layer="",
        phase=Phase.OPTIMIZER,
        duration_s=seconds,
        inputs=tuple(reads),
        outputs=tuple(outputs),
        writes=tuple(writes),
    )


def scaled(profile: Profile, factor: int) -> Profile:
    """The step with all values this many times as large, on a link as many times as fast."""
    values = tuple(msgspec.structs.replace(one, size_bytes=one.size_bytes * factor) for one in profile.values)
    ops = tuple(msgspec.structs.replace(one, workspace_bytes=one.workspace_bytes * factor) for one in profile.ops)
    ways = {
        way: msgspec.structs.replace(one, bandwidth_bytes_per_s=one.bandwidth_bytes_per_s * factor)
        for way, one in (("outward", profile.link.outward), ("inward", profile.link.inward))
    }
    found = msgspec.structs.replace(profile, values=values, ops=ops, link=msgspec.structs.replace(profile.link, **ways))
    return msgspec.structs.replace(found, in_core_peak_bytes=int(live_bytes(found).max()))

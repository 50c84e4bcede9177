"""Profiles for the planner's tests: a small recorder that plays autograd, shapes of real networks, random DAGs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from poochplan.formats.occupancy import live_bytes
from poochplan.formats.profile import (
    Device,
    Handle,
    Kind,
    Link,
    LinkDirection,
    ModelSignature,
    Op,
    Phase,
    Point,
    PointKind,
    Profile,
    RuntimeCost,
    StepTimes,
    Value,
)

Record = TypeVar("Record", bound=msgspec.Struct)


def link(
    gb_per_s: float = 1.0,
    latency_s: float = 0.0,
    duplex: float = 1.0,
    interference_out: float = 0.0,
    interference_in: float = 0.0,
    inward_gb_per_s: float | None = None,
) -> Link:
    inward = gb_per_s if inward_gb_per_s is None else inward_gb_per_s
    return Link(
        name="test",
        outward=LinkDirection(latency_s=latency_s, bandwidth_bytes_per_s=gb_per_s * 1e9),
        inward=LinkDirection(latency_s=latency_s, bandwidth_bytes_per_s=inward * 1e9),
        duplex=duplex,
        interference_out=interference_out,
        interference_in=interference_in,
    )


@dataclass
class _Value:
    name: str
    kind: Kind
    size_bytes: int
    born: int
    pinned: str = ""
    unreplayable: str = ""
    death_op: int = -1
    freed_op: int = -1
    outlives: bool = False


@dataclass
class _Node:
    op: int
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    handles: list[int]
    backward_s: float
    in_graph: bool


@dataclass
class Recorder:
    """Records a forward pass op by op, as a model would run it; :meth:`finish` adds backward and the optimizer."""

    ops: list[Op] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    points: list[tuple[PointKind, int, int]] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)

    def before(self, size_bytes: int, kind: Kind = Kind.PARAMETER) -> int:
        """A value that is there before the step and outlives it."""
        name = f"{kind.value}{len(self.values)}"
        self.values.append(_Value(name, kind, size_bytes, born=-1, outlives=True))
        return len(self.values) - 1

    def op(
        self,
        name: str,
        reads: list[int],
        outputs: list[int] | None = None,
        *,
        saves: list[int] | None = None,
        saves_outputs: bool = False,
        writes: list[int] | None = None,
        seconds: float = 1e-3,
        backward_s: float | None = None,
        opaque: bool = False,
        random: bool = False,
        workspace_bytes: int = 0,
        in_graph: bool = True,
    ) -> list[int]:
        """Runs one op; ``outputs`` are sizes in bytes. Packs ``saves`` before it and its results after it."""
        index = len(self.ops)
        writes = writes or []
        handles = [self._pack(value, index) for value in saves or []]
        born = []
        for size_bytes in outputs or []:
            born.append(len(self.values))
            self.values.append(_Value(f"{name}{index}/out{len(born)}", Kind.TEMPORARY, size_bytes, born=index))
        reads = list(dict.fromkeys([*reads, *writes]))
        for value in [*reads, *born]:
            self.values[value].death_op = index
        self.ops.append(
            Op(
                name=name,
                layer=f"layer{index}",
                phase=Phase.FORWARD,
                duration_s=seconds,
                inputs=tuple(reads),
                outputs=tuple(born),
                writes=tuple(writes),
                opaque=opaque,
                random=random,
                workspace_bytes=workspace_bytes,
            )
        )
        results = [*born, *writes]
        if saves_outputs:
            handles += [self._pack(value, index + 1) for value in results]
        seconds_back = 2 * seconds if backward_s is None else backward_s
        self.nodes.append(_Node(index, tuple(reads), tuple(results), handles, seconds_back, in_graph))
        return results

    def hold_until_end(self, value: int) -> None:
        """Something of the user's keeps the value to the end of the step."""
        self.values[value].outlives = True

    def _pack(self, value: int, ops_done: int) -> int:
        self.handles.append(value)
        if value not in self.saved:
            self.saved.add(value)
            self.points.append((PointKind.SAVE, len(self.handles) - 1, ops_done))
            if self.values[value].kind is Kind.TEMPORARY:
                self.values[value].kind = Kind.ACTIVATION
            else:
                self.values[value].pinned = "it was there before the step"
        return len(self.handles) - 1

    def finish(self, link: Link, *, optimizer_s: float = 0.0, state_bytes: int = 0) -> Profile:
        """Adds backward (each node once, in reverse) and one optimizer op, and computes lifetimes."""
        for value in self.values:
            value.freed_op = max(value.freed_op, value.death_op)
        self._backward()
        if state_bytes or optimizer_s:
            parameters = [i for i, value in enumerate(self.values) if value.kind is Kind.PARAMETER]
            states = [self.before(state_bytes, Kind.OPTIMIZER_STATE)] if state_bytes else []
            self.ops.append(
                Op(
                    name="adam",
                    layer="",
                    phase=Phase.OPTIMIZER,
                    duration_s=optimizer_s,
                    inputs=tuple(parameters + states),
                    writes=tuple(parameters + states),
                )
            )
        return self._profile(link)

    def _backward(self) -> None:
        forward_ops = len(self.ops)
        gradient: dict[int, int] = {}
        for node in reversed(self.nodes):
            if not node.in_graph:
                for handle in node.handles:
                    value = self.values[self.handles[handle]]
                    value.freed_op = max(value.freed_op, forward_ops - 1)
                continue
            index = len(self.ops)
            for handle in node.handles:
                self.points.append((PointKind.USE, handle, index))
                value = self.values[self.handles[handle]]
                value.freed_op = max(value.freed_op, index)
            born = []
            for read in node.reads:
                record = self.values[read]
                is_weight = record.kind is Kind.PARAMETER
                if read in gradient or not (is_weight or record.kind in (Kind.TEMPORARY, Kind.ACTIVATION)):
                    continue
                gradient[read] = len(self.values)
                born.append(len(self.values))
                kind, name = Kind.GRADIENT if is_weight else Kind.TEMPORARY, f"grad of {record.name}"
                self.values.append(_Value(name, kind, record.size_bytes, born=index, outlives=is_weight))
            used = [gradient[v] for v in node.outputs if v in gradient]
            for value in [*used, *born]:
                self.values[value].death_op = self.values[value].freed_op = index
            reads = [*used, *(self.handles[handle] for handle in node.handles)]
            self.ops.append(
                Op(
                    name=f"{self.ops[node.op].name}_backward",
                    layer=self.ops[node.op].layer,
                    phase=Phase.BACKWARD,
                    duration_s=node.backward_s,
                    inputs=tuple(dict.fromkeys(reads)),
                    outputs=tuple(born),
                )
            )

    def _profile(self, link: Link) -> Profile:
        ops = tuple(self.ops)
        points = tuple(Point(kind=kind, handle=handle, op=op) for kind, handle, op in self.points)
        ticks = [index + sum(point.op <= index for point in points) for index in range(len(ops))]
        last_tick = len(ops) + len(points) - 1
        values = []
        for value in self.values:
            death = last_tick if value.outlives else ticks[max(value.death_op, 0)]
            freed = last_tick if value.outlives else ticks[max(value.freed_op, value.death_op, 0)]
            values.append(
                Value(
                    name=value.name,
                    layer=f"layer{max(value.born, 0)}",
                    kind=value.kind,
                    size_bytes=value.size_bytes,
                    dtype="float32",
                    shape=(value.size_bytes // 4,),
                    born=value.born,
                    forward_death=death,
                    freed=freed,
                    pinned=value.pinned,
                    unreplayable=value.unreplayable,
                )
            )
        seconds = {phase: sum(op.duration_s for op in ops if op.phase is phase) for phase in Phase}
        made = Profile(
            workload="test",
            mode="run",
            device=Device(kind="cpu", name="test", memory_bytes=2**40),
            versions={},
            model=ModelSignature(fingerprint="test", tensors=()),
            ops_fingerprint="test",
            times=StepTimes(
                forward_s=seconds[Phase.FORWARD],
                backward_s=seconds[Phase.BACKWARD],
                optimizer_s=seconds[Phase.OPTIMIZER],
                step_s=sum(seconds.values()),
                spread_s=0.0,
                iterations=1,
                forward_scale=1.0,
                backward_scale=1.0,
                optimizer_scale=1.0,
            ),
            in_core_peak_bytes=0,
            in_core_peak_layer="",
            static_bytes={},
            gradients_live_through_forward=False,
            link=link,
            ops=ops,
            values=tuple(values),
            handles=tuple(
                Handle(value=v, layer="", dtype="float32", shape=(self.values[v].size_bytes // 4,))
                for v in self.handles
            ),
            points=points,
        )
        return msgspec.structs.replace(made, in_core_peak_bytes=int(live_bytes(made).max()))


def with_facts(record: Record, field: str, place: int, **facts: Any) -> Record:
    """A profile or a plan with other facts about one of its values, or ops."""
    items = list(getattr(record, field))
    items[place] = msgspec.structs.replace(items[place], **facts)
    return msgspec.structs.replace(record, **{field: tuple(items)})


def resnet_like(blocks: int = 8, *, link_gb_per_s: float = 1.0) -> Profile:
    """Residual blocks of convolution, batch norm, in-place ReLU, and a functional add."""
    r = Recorder()
    size = 4 << 20
    x = r.before(size, Kind.INPUT)
    (x,) = r.op("stem", [x, r.before(4096)], [size], saves=[x], seconds=2e-3)
    for block in range(blocks):
        if block and block % 4 == 0:
            size //= 2
        y = x
        for _ in range(2):
            weight, gamma, mean = r.before(size // 16), r.before(1024), r.before(1024, Kind.BUFFER)
            (y,) = r.op("conv", [y, weight], [size], saves=[y], seconds=4e-3)
            y, *statistics, _ = r.op("bn", [y, gamma], [size, 1024, 1024], writes=[mean], saves=[y], seconds=4e-4)
            r.nodes[-1].handles.extend(r._pack(value, len(r.ops)) for value in statistics)
            (y,) = r.op("relu_", [y], writes=[y], saves_outputs=True, seconds=2e-4)
        if size != r.values[x].size_bytes:
            (x,) = r.op("down", [x, r.before(size // 16)], [size], saves=[x], seconds=1e-3)
        (x,) = r.op("add", [x, y], [size], seconds=2e-4)
    r.op("loss", [x], [1024], saves=[x], seconds=1e-3)
    return r.finish(link(link_gb_per_s), optimizer_s=1e-3, state_bytes=size)


def unet_like(depth: int = 4, *, link_gb_per_s: float = 1.0) -> Profile:
    """Encoder and decoder with skips that forward holds until they are concatenated."""
    r = Recorder()
    size = 32 << 20
    x = r.before(size, Kind.INPUT)
    skips = []
    for _ in range(depth):
        for _ in range(2):
            (x,) = r.op("conv", [x, r.before(4096)], [size], saves=[x], seconds=size / 4e9)
            (x,) = r.op("relu", [x], [size], saves_outputs=True, seconds=size / 4e10)
        skips.append(x)
        size //= 4
        (x,) = r.op("pool", [x], [size], saves=[x], seconds=size / 1e10)
    for skip in reversed(skips):
        size *= 4
        (x,) = r.op("up", [x, r.before(4096)], [size], saves=[x], seconds=size / 1e10)
        (x,) = r.op("cat", [x, skip], [2 * size], seconds=size / 2e10)
        (x,) = r.op("conv", [x, r.before(4096)], [size], saves=[x], seconds=size / 2e9)
        (x,) = r.op("relu", [x], [size], saves_outputs=True, seconds=size / 4e10)
    r.op("loss", [x], [1024], saves=[x])
    return r.finish(link(link_gb_per_s))


def transformer_like(layers: int = 4, *, mib: int = 4, link_gb_per_s: float = 1.0) -> Profile:
    """Pre-norm blocks with attention and dropout, whose masks are saved too."""
    r = Recorder()
    size = mib << 20
    x = r.before(size, Kind.INPUT)
    (x,) = r.op("embed", [x, r.before(size)], [size], saves=[x])
    for _ in range(layers):
        h, *_ = r.op("norm", [x, r.before(4096)], [size, 4096, 4096], saves=[x], saves_outputs=False, seconds=3e-4)
        (qkv,) = r.op("qkv", [h, r.before(size // 4)], [3 * size], saves=[h], seconds=6e-3)
        attended, _ = r.op("attention", [qkv], [size, size // 16], saves=[qkv], saves_outputs=True, seconds=5e-3)
        (projected,) = r.op("proj", [attended, r.before(size // 8)], [size], saves=[attended], seconds=2e-3)
        dropped, mask = r.op("dropout", [projected], [size, size // 4], random=True, seconds=3e-4)
        r.nodes[-1].handles.append(r._pack(mask, len(r.ops)))
        (x,) = r.op("add", [x, dropped], [size], seconds=2e-4)
        h, *_ = r.op("norm", [x, r.before(4096)], [size, 4096, 4096], saves=[x], seconds=3e-4)
        (h,) = r.op("fc1", [h, r.before(size // 2)], [4 * size], saves=[h], seconds=8e-3)
        (g,) = r.op("gelu", [h], [4 * size], saves=[h], seconds=6e-4)
        (h,) = r.op("fc2", [g, r.before(size // 2)], [size], saves=[g], seconds=8e-3)
        (x,) = r.op("add", [x, h], [size], seconds=2e-4)
    r.op("loss", [x], [1024], saves=[x])
    return r.finish(link(link_gb_per_s), optimizer_s=2e-3, state_bytes=2 * size)


def random_profile(seed: int, op_count: int = 12) -> Profile:
    """A random DAG: chains, skips, diamonds, in-place chains, values saved twice, unsaved intermediates."""
    rng = random.Random(seed)
    r = Recorder()
    alive = [r.before(rng.randint(1, 8) * 1024, Kind.INPUT)]
    buffer = r.before(256, Kind.BUFFER)
    for _ in range(op_count):
        _random_op(r, rng, alive, buffer)
    r.op("loss", alive[-1:], [256], saves=alive[-1:] if rng.random() < 0.7 else [])
    if rng.random() < 0.2:
        r.hold_until_end(rng.choice(alive))
    return r.finish(
        link(
            gb_per_s=10 ** rng.uniform(-3, 0),
            latency_s=rng.choice([0.0, 1e-5, 1e-3]),
            duplex=rng.choice([1.0, 0.5, 0.7]),
            interference_out=rng.choice([0.0, 0.3]),
            interference_in=rng.choice([0.0, 0.5]),
        ),
        optimizer_s=rng.choice([0.0, 1e-3]),
        state_bytes=rng.choice([0, 4096]),
    )


def _random_op(r: Recorder, rng: random.Random, alive: list[int], buffer: int) -> None:
    seconds = 10 ** rng.uniform(-5, -2)
    parameter = [r.before(rng.randint(1, 4) * 300)] if rng.random() < 0.5 else []
    recent = alive[-3:] if rng.random() < 0.8 else alive
    reads = rng.sample(recent, k=min(len(recent), rng.choice([1, 1, 1, 2])))
    kind = rng.random()
    if kind < 0.2 and r.values[reads[0]].born >= 0 and reads[0] not in r.saved:
        r.op("inplace", reads, writes=[reads[0]], saves_outputs=rng.random() < 0.6, seconds=seconds)
        return
    sizes = [rng.randint(1, 16) * 700 for _ in range(rng.choice([1, 1, 1, 2]))]
    outputs = r.op(
        "op",
        [*reads, *parameter],
        sizes,
        saves=[value for value in reads if rng.random() < 0.6],
        saves_outputs=rng.random() < 0.3,
        writes=[buffer] if rng.random() < 0.1 else [],
        seconds=seconds,
        opaque=rng.random() < 0.08,
        random=rng.random() < 0.1,
        workspace_bytes=rng.choice([0, 0, 3000]),
        in_graph=rng.random() < 0.95,
    )
    alive.extend(value for value in outputs if value != buffer)


def any_seconds(rng: random.Random) -> float:
    """Of an op that takes time."""
    return float(1e-3 * 10 ** rng.uniform(-1.3, 0.6))


def few_seconds(rng: random.Random) -> float:
    """Of an op that is cheap."""
    return float(1e-4 * 10 ** rng.uniform(-1, 0.5))


def finished_with_a_random_link(r: Recorder, rng: random.Random) -> Profile:
    """The recorded step, over a link that needs about as long as the ops, or very unlike that."""
    saved_bytes = sum(r.values[value].size_bytes for value in r.saved)
    fair = saved_bytes / (1e-3 * len(r.ops)) / 1e9
    slow = rng.random() < 0.4
    line = link(
        fair * 10 ** rng.uniform(-1.5, 1.5),
        rng.choice([0.0, 0.0, 5e-5]),
        duplex=rng.choice([1.0, 0.6]) if slow else 1.0,
        interference_out=rng.choice([0.0, 0.4]) if slow else 0.0,
        interference_in=rng.choice([0.0, 0.4]) if slow else 0.0,
    )
    return r.finish(line, optimizer_s=rng.choice([0.0, 1e-3]))


def with_random_thread(profile: Profile, seed: int) -> Profile:
    """The profile with a launching thread whose every cost is random and often 0, on the CPU or ahead of a device."""
    rng = random.Random(f"thread {seed}")
    typical_s = sum(op.duration_s for op in profile.ops) / len(profile.ops)

    def cost() -> float:
        return 0.0 if rng.random() < 0.2 else typical_s * 10 ** rng.uniform(-2.5, 0.5)

    handle_s, swap_s = cost(), cost()
    runtime = RuntimeCost(
        handle_s=handle_s,
        swap_s=swap_s,
        record_s=cost(),
        drop_s=cost(),
        replay_s=cost(),
        launch_s=cost(),
        phase_launch_s={phase: cost() for phase in Phase if rng.random() < 0.4},
        unpack_s=handle_s * rng.choice([0.0, 0.3, 1.0]),
        fetch_s=swap_s * rng.choice([0.0, 0.5, 1.0]),
    )
    device = msgspec.structs.replace(profile.device, kind=rng.choice(["cpu", "cuda"]))
    return msgspec.structs.replace(profile, runtime=runtime, device=device)


QUICK = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def profiles(max_ops: int = 16) -> st.SearchStrategy[Profile]:
    """Random DAG profiles that have at least one saved value that backward uses."""
    return st.builds(random_profile, st.integers(0, 2**32), st.integers(3, max_ops)).filter(
        lambda profile: any(point.kind is PointKind.USE for point in profile.points)
    )


def profiles_with_thread(max_ops: int = 16) -> st.SearchStrategy[Profile]:
    """The same, half of them with a random launching thread."""
    return st.builds(
        lambda profile, seed: with_random_thread(profile, seed) if seed % 2 else profile,
        profiles(max_ops),
        st.integers(0, 2**32),
    )

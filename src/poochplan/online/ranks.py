"""Ranks: data-parallel training, where rank 0 profiles and plans, and all ranks begin to follow at the same step; and
the ranks of a command line that torchrun has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from poochplan.errors import UsageError
from poochplan.formats.files import encode_readable
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import describe
from poochplan.profiler.live.step_function import StepFunction
from poochplan.profiler.live.step_kinds import Key
from poochplan.profiler.request import checked_device
from poochplan.runtime.metering.allocated import aside, step_scope
from poochplan.runtime.metering.census import EVERY, DataParallel, wrapper_of
from poochplan.torch_private.sharding import counts_of_ranks, is_sharded, rebuilds_buckets, takes_uneven_inputs
from poochplan.torch_private.tensor_internals import without_modes
from poochplan.workload import Workload

T = TypeVar("T")
ALIKE_STEPS = 8
"""Ranks compare their kinds of segments after this many steps or more. By then inputs that vary have varied."""
BUCKET_BYTES = 25 << 20
"""Bytes that data-parallel training reduces at a time, by torch's default."""


class RankMessage(msgspec.Struct, frozen=True):
    """The message of rank 0 to the others: plans in force from now on, kinds that are like others, whether that is all
    for now, and whether nothing more is under way.
    """

    plans: list[tuple[Key, Plan]]
    alike: list[tuple[Key, Key]]
    is_all: bool
    is_settled: bool = False


class Buckets:
    """State: whether the gradient buckets of data-parallel wrappers are known to be those of all later steps."""

    def __init__(self) -> None:
        self._are_final = False

    def are_final(self, models: Iterable[torch.nn.Module], segment: int) -> bool:
        """Whether the models' segments are like all later ones: the second step makes new gradient buckets. Some
        compiled models keep theirs, so it does not wait longer.
        """
        if not self._are_final:  # to find a wrapper takes as long as a small step
            wrappers = map(wrapper_of, models)
            self._are_final = segment > EVERY or not any(rebuilds_buckets(one) for one in wrappers if one is not None)
        return self._are_final


class Ranks:
    """A separate process group on the CPU. Every rank makes one at the same place in its program."""

    def __init__(self, wrappers: Iterable[DataParallel] = ()) -> None:
        self._group = dist.new_group(backend="gloo")
        self._wrappers = [weakref.ref(one) for one in wrappers]
        self.is_first = dist.get_rank() == 0
        self.is_settled = False
        """From rank 0's last message."""
        self.steps = 0
        """Of the optimizers, on this rank as on every other."""
        self._kinds: Counter[Key] | None = Counter()
        """This rank's segments by kind; None once the ranks have compared theirs."""
        self._has_shared = False
        """Whether they have had a plan."""
        self._ordering: dist.Work | None = None

    @classmethod
    def of(cls, models: Iterable[torch.nn.Module]) -> Ranks | None:
        """The group for models that all processes train, by a wrapper (which need not be the one given here) or sharded
        by FSDP2. None if this one trains them alone, or with some of the others: these may be anywhere in their
        program, so each plans for itself.
        """
        models = list(models)
        wrappers = [one for one in map(wrapper_of, models) if one is not None]
        counts = {dist.get_world_size(one.process_group) for one in wrappers}.union(*map(counts_of_ranks, models))
        return cls(wrappers) if counts - {1} and counts == {dist.get_world_size()} else None

    def are_uneven(self) -> bool:
        """Whether they may take different numbers of steps, so that one that shares might wait for ever (``Join``)."""
        there = (reference() for reference in self._wrappers)
        return any(one is not None and takes_uneven_inputs(one) for one in there)

    def are_due(self) -> bool:
        """Whether the ranks share after this step. Every rank calls it: they share after each step until all is
        settled, then only after one step in several.
        """
        self.steps += 1
        return not self.is_settled or self.steps == ALIKE_STEPS or self.steps % EVERY == 0

    def saw(self, kind: Key) -> None:
        """A segment of that kind begins on this rank."""
        if self._kinds is not None:
            self._kinds[kind] += 1

    def share(self, what: RankMessage | None) -> RankMessage | None:
        """The message of rank 0, if there is one. Every rank calls it after the same step.

        Raises ``UsageError`` on every rank if the ranks did not get the same, or once if their segments are not alike.
        """
        shared = self._received(what)
        self._has_shared |= shared is not None and bool(shared.plans)
        if self._has_shared and self._kinds is not None and self.steps >= ALIKE_STEPS:
            kinds, self._kinds = self._kinds, None
            self.check_alike(kinds)
        return shared

    def _received(self, what: RankMessage | None) -> RankMessage | None:
        data = encode_readable(what) if what is not None else b""
        size = _numbers(len(data))
        dist.broadcast(size, 0, self._group)
        if not size.item():
            return None
        content = torch.frombuffer(bytearray(data or int(size.item())), dtype=torch.uint8)
        dist.broadcast(content, 0, self._group)
        received = content.numpy().tobytes()
        self.check_same(received)
        shared = msgspec.json.decode(received, type=RankMessage)
        self.is_settled = shared.is_settled
        return shared

    def check_same(self, content: bytes) -> None:
        """Raises ``UsageError`` on every rank if the content of the plan is not the same on all."""
        digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
        bounds = _numbers(digest, -digest)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, self._group)
        if bounds.tolist() != [digest, -digest]:
            raise UsageError(
                "plan: expected the same one on all ranks, found that they differ; give each the same file, or train "
                "without a session"
            )

    def check_alike(self, kinds: Counter[Key]) -> None:
        """Raises ``UsageError`` on every rank, with one text, if the segments of a rank were other or larger ones than
        those of rank 0 all along, so that they would not follow its plans. Every rank calls it with the number of its
        segments by kind.
        """
        first, *others = map(_constant, self.gathered(kinds))
        for rank, here in enumerate(others, 1):
            for place, found in here.items():
                wanted = first.get(place, found)
                if found != wanted and not wanted.is_larger(found):
                    raise UsageError(
                        f"steps: expected the same ones on all ranks, with {_told(wanted, found)} as on rank 0, found "
                        f"{_told(found, wanted)} on rank {rank}; give all ranks the same, or rank 0 the largest "
                        "inputs, or train without a session"
                    )

    def least(self, number: int) -> int:
        """The least of every rank's number, once all have called this."""
        found = _numbers(number)
        dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return int(found.item())

    def on_any(self, fact: bool) -> bool:
        return self.least(-int(fact)) < 0

    def gathered(self, what: T) -> list[T]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, what, self._group)
        return found

    @staticmethod
    @contextlib.contextmanager
    def reducing(where: torch.device) -> Iterator[Callable[[], None]]:
        """A block with a function that begins to reduce a bucket of the device's, once the last one is reduced. Every
        rank calls it equally often; none is under way behind the block.
        """
        bucket, under_way = torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=where), list[dist.Work]()

        def ended() -> None:
            while under_way:
                under_way.pop().wait()

        def begin() -> None:
            ended()
            work = dist.all_reduce(bucket, async_op=True)
            assert work is not None
            under_way.append(work)

        try:
            yield begin
        finally:
            ended()

    def led(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """On rank 0: the step, which the other ranks begin at the same time (:meth:`follow`)."""

        def together() -> torch.Tensor:
            self._order(1)
            return step()

        together.is_led = True  # type: ignore[attr-defined]
        return together

    def follow(self, workload: Workload, *, accumulate: bool) -> None:
        """On all ranks but 0: runs a step by PyTorch alone with each step of rank 0's, until these end."""
        where = checked_device(workload.model, None, None, 1)
        steps = StepFunction(workload.step, workload.model, workload.optimizer, where, accumulate=accumulate)
        while self._order(0):
            steps.one_step()

    def close(self) -> None:
        """Ends the group's threads, which may otherwise still free a tensor while the interpreter exits: this aborts
        the process (pytorch#179291). May be called again.
        """
        self._ordering = None
        with contextlib.suppress(ValueError):  # the user has destroyed all groups
            dist.destroy_process_group(self._group)
        self._group = dist.GroupMember.NON_GROUP_MEMBER

    def end_steps(self) -> None:
        """On rank 0: the other ranks run no more steps."""
        self._order(0)

    def _order(self, count: int) -> int:
        """The number of steps that rank 0 orders. Rank 0 does not wait, and a step that is captured does not see it."""
        with without_modes(), aside():
            order = _numbers(count)
            self._ordering = dist.broadcast(order, 0, self._group, async_op=True)
            if not self.is_first:
                self._ordering.wait()
            return int(order.item())


def _numbers(*numbers: int) -> torch.Tensor:
    """In host memory, whatever the user's default device is."""
    return torch.tensor(numbers, device="cpu")


def _constant(kinds: Counter[Key]) -> dict[Key, Key]:
    """The kinds of segments that always came at their place of a step, by that place."""
    there = defaultdict[Key, list[Key]](list)
    for kind in kinds:
        there[kind._replace(inputs=(), switches="")].append(kind)
    return {place: one for place, (one, *more) in there.items() if not more and kinds[one] >= ALIKE_STEPS // 2}


def _told(kind: Key, other: Key) -> str:
    """The difference from the other kind: inputs, or settings of torch and the model."""
    if kind.inputs != other.inputs:
        return describe(kind.inputs)
    return " ".join(one for one in kind.switches.split() if one not in other.switches.split())


@contextlib.contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """A block in which the processes that torchrun has started are one process group."""
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    ranks = None
    try:
        ranks = Ranks()
        yield ranks
    finally:
        if ranks is not None:
            ranks.close()
        dist.destroy_process_group()


def data_parallel(workload: Workload) -> Workload:
    """The workload with its model wrapped for data-parallel training. It is left as it is if FSDP2 shards its model.

    The step calls the model that it knows, and reaches the wrapper by it.
    """
    model = workload.model
    if is_sharded(model):
        return workload
    wrapper = wrapper_of(model)
    if wrapper is None:
        if all(one.device.type == "cpu" for one in model.parameters()):
            step_scope()  # counts from now on: the second step frees these buckets for others
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
        _calls_wrapper(model, wrapper)
    return dataclasses.replace(workload, model=wrapper)


def _calls_wrapper(model: torch.nn.Module, wrapper: torch.nn.Module) -> None:
    """From now on a call of the model is a call of its wrapper, which calls the model itself."""
    kind: Any = type(model)
    is_inside = False

    class Wrapped(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return super().__call__(*args, **kwargs)
            is_inside = True
            try:
                return wrapper(*args, **kwargs)
            finally:
                is_inside = False

    for name in ("__module__", "__name__", "__qualname__"):
        setattr(Wrapped, name, getattr(kind, name))
    model.__class__ = Wrapped

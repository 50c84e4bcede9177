"""Ranks: data-parallel training, where rank 0 profiles and plans, and all ranks begin to follow at the same step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
import torch
import torch.distributed as dist

from poochplan.errors import UsageError
from poochplan.formats.files import encode_readable
from poochplan.formats.plan import Plan
from poochplan.profiler.live.step_kinds import Key
from poochplan.runtime.watch.census import EVERY, wrapper_of
from poochplan.torch_private.sharding import is_sharded, rebuilds_buckets


class Shared(msgspec.Struct, frozen=True):
    """The message of rank 0 to the others: plans in force from now on, kinds that are like others, whether that is all
    for now, and whether nothing more is under way.
    """

    plans: list[tuple[Key, Plan]]
    alike: list[tuple[Key, Key]]
    is_all: bool
    is_settled: bool = False


class Ranks:
    """A separate process group on the CPU. Every rank makes one at the same place in its program."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self.is_first = dist.get_rank() == 0
        self.is_settled = False
        """From rank 0's last message."""
        self._steps = 0

    @classmethod
    def of(cls, models: Iterable[torch.nn.Module]) -> Ranks | None:
        """The group for models that several processes train, by a wrapper (which need not be the one given here) or
        sharded by FSDP2; None if there is none.
        """
        wrapped = any(wrapper_of(model) is not None or is_sharded(model) for model in models)
        return cls() if wrapped and dist.get_world_size() > 1 else None

    @staticmethod
    def are_ready(models: Iterable[torch.nn.Module], segment: int) -> bool:
        """Whether the models' segments are like all later ones: the second step makes new gradient buckets. Some
        compiled models keep theirs, so it does not wait longer.
        """
        wrappers = map(wrapper_of, models)
        return segment > EVERY or not any(rebuilds_buckets(one) for one in wrappers if one is not None)

    def are_due(self) -> bool:
        """Whether the ranks share after this step. Every rank calls it: they share after each step until all is
        settled, then only after one step in several.
        """
        self._steps += 1
        return not self.is_settled or self._steps % EVERY == 0

    def share(self, what: Shared | None) -> Shared | None:
        """The message of rank 0, if there is one. Every rank calls it after the same step.

        Raises ``UsageError`` on every rank if the ranks did not get the same.
        """
        data = encode_readable(what) if what is not None else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, self._group)
        if not size.item():
            return None
        content = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(content, 0, self._group)
        received = content.numpy().tobytes()
        self._check(received)
        shared = msgspec.json.decode(received, type=Shared)
        self.is_settled = shared.is_settled
        return shared

    def _check(self, received: bytes) -> None:
        digest = int.from_bytes(hashlib.sha256(received).digest()[:7], "big")
        bounds = torch.tensor([digest, -digest])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, self._group)
        if bounds.tolist() != [digest, -digest]:
            raise UsageError(
                "plan: expected the same one on all ranks, found that they differ; train without a session"
            )

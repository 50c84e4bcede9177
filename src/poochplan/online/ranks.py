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
    """What rank 0 tells the others: plans that are in force from now on, which kinds are like which, whether that is
    all for now, and whether nothing more is under way.
    """

    plans: list[tuple[Key, Plan]]
    alike: list[tuple[Key, Key]]
    is_all: bool
    is_settled: bool = False


class Ranks:
    """A group of its own beside the training's, on the CPU. Every rank makes one at the same place in its program."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self.is_first = dist.get_rank() == 0
        self.is_settled = False
        """As rank 0 has said last."""
        self._steps = 0

    @classmethod
    def of(cls, models: Iterable[torch.nn.Module]) -> Ranks | None:
        """None where no model is trained by several processes: by a wrapper around it, which may not be the one that
        is given here, or sharded by FSDP2.
        """
        wrapped = any(wrapper_of(model) is not None or is_sharded(model) for model in models)
        return cls() if wrapped and dist.get_world_size() > 1 else None

    @staticmethod
    def are_ready(models: Iterable[torch.nn.Module], segment: int) -> bool:
        """Whether the segments of these are as all later ones: gradient buckets are made anew in the second step. Some
        compiled models keep theirs, and that is not waited for any longer.
        """
        wrappers = map(wrapper_of, models)
        return segment > EVERY or not any(rebuilds_buckets(one) for one in wrappers if one is not None)

    def are_due(self) -> bool:
        """Whether they are to share behind this step, which every rank asks: behind each until all is settled, then
        behind one in so many.
        """
        self._steps += 1
        return not self.is_settled or self._steps % EVERY == 0

    def share(self, what: Shared | None) -> Shared | None:
        """Called by every rank after the same step; gives what rank 0 has brought, if that is something.

        Raises ``UsageError`` on every rank where it did not arrive alike.
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

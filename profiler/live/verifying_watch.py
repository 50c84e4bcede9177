"""Verifying: a segment in which values are recomputed and compared with what was saved; originals are what is used."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from itertools import zip_longest

import msgspec
import torch

from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Profile
from poochplan.formats.queries import saved_values
from poochplan.profiler.assembly.values import UNWRITTEN
from poochplan.profiler.step.preserve import preserved
from poochplan.profiler.trials.compare import RECORDED, verification, verifying, without_replays
from poochplan.profiler.trials.host_store import HostStore
from poochplan.profiler.trials.plans import instructions_for
from poochplan.profiler.trials.untouched import bytes_of
from poochplan.profiler.trials.verify_replays import PIECE_BYTES, Verify
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.handle import Handle
from poochplan.runtime.step_policies.course import Course
from poochplan.runtime.step_policies.follow import Follow
from poochplan.runtime.step_policies.swap_each import SwapEach
from poochplan.tensors.malloc import new_memory_holds
from poochplan.tensors.storages import has_storage
from poochplan.torch_private.tensor_internals import in_backward, without_modes

from .step_function import StepFunction
from .watch import Pack, Scene, Watch


class Summing(Watch):
    """``sums`` has one over each tensor that forward saves; 0 for values at the save points that are ``unwritten``."""

    sums: list[int] | None = None
    unwritten: Container[int] = ()

    def sum_up(self, unwritten: Container[int]) -> None:
        """From here on."""
        self.sums, self.unwritten = [], unwritten

    def pack(self, tensor: torch.Tensor, pack: Pack) -> Handle:
        if self.sums is None or in_backward():
            return super().pack(tensor, pack)
        sum_, handle = _sum(tensor, self.scene.where.type), super().pack(tensor, pack)
        self.sums.append(0 if handle.value is not None and handle.value.index in self.unwritten else sum_)
        return handle


class Verifying(Summing):
    """``verify`` has the verdicts."""

    def __init__(self, scene: Scene, instructions: Instructions) -> None:
        self._stores = contextlib.ExitStack()
        self.verify: Verify = verifying(instructions, scene.model, lambda: self._store(scene))
        super().__init__(scene, self.verify)
        self.rebuild = self.verify.rebuild
        self.swaps_once = True

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        if self.scene.there_before is None:
            self.look_around()
        yield

    def _store(self, scene: Scene) -> HostStore:
        return self._stores.enter_context(contextlib.closing(HostStore(scene.where, scene.spill_dir)))

    def end(self, *, stepped: bool) -> None:
        super().end(stepped=stepped)
        self._stores.close()


def verify(profile: Profile, steps: StepFunction) -> Profile:
    """The profile with ``unreplayable`` set on every value whose replay was tried and failed, by steps run now.

    Replays are compared with what a recorded step has saved, and that, where the step repeats itself, with what one has
    saved that no mode saw. Where these differ nothing is recomputed, since recording alone would change bits. What a
    kernel leaves unwritten holds whatever memory held, so the steps that no mode sees get memory of other bytes each,
    and what differs between them is not compared.
    """
    saved, runner = saved_values(profile), steps.runner
    unwritten = frozenset(at for at, one in enumerate(saved) if profile.values[one].unreplayable.endswith(UNWRITTEN))

    def plain(byte: int) -> list[int]:
        with preserved(runner.model, runner.optimizer), new_memory_holds(byte):
            return _summed(steps.run(_unrecorded(profile, steps.scene, unwritten)))

    first = plain(0)
    other = plain(1) if first == plain(0) else []  # what differs by itself tells nothing of recording
    trials, is_first = verification(profile), True
    trial = next(trials)
    while True:
        watch = Verifying(steps.scene, trial)
        if is_first:
            watch.sum_up(unwritten)
        steps.run(watch)
        if is_first and other and any(a == b != c for a, b, c in zip_longest(first, other, _summed(watch))):
            return without_replays(profile, RECORDED)
        is_first = False
        try:
            trial = trials.send(watch.verify)
        except StopIteration as verified:
            return verified.value


def _unrecorded(profile: Profile, scene: Scene, unwritten: Container[int]) -> Summing:
    """A step that no mode sees. Memory is about what verification takes."""
    rest = Decision.SWAP if profile.mode == "swap-all" else Decision.KEEP
    every = [Decision.KEEP if profile.values[one].pinned else rest for one in saved_values(profile)]
    instructions = msgspec.structs.replace(instructions_for(profile, every), record_from_start=False)
    watch = Summing(scene, Follow(Course.of(instructions), SwapEach()))
    watch.sum_up(unwritten)
    return watch


def _summed(watch: Summing) -> list[int]:
    assert watch.sums is not None
    return watch.sums


def _sum(tensor: torch.Tensor, kind: str) -> int:
    """Over what lies in its storage, as numbers of four bytes; 0 where it has none, or is a part of a larger one, or
    lies elsewhere than what is replayed.
    """
    if not has_storage(tensor, kind) or tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
        return 0
    with without_modes(), torch.no_grad():
        pieces = bytes_of(tensor.untyped_storage()).split(PIECE_BYTES)  # a sum is of numbers of eight bytes
        words = [one[: len(one) // 4 * 4].view(torch.int32) for one in pieces]
        return sum(int(one.sum(dtype=torch.int64)) for one in (*words, pieces[-1][len(words[-1]) * 4 :]))

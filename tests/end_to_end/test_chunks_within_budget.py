"""Truncated back-propagation under one plan: epochs of several chunks, bitwise as in-core, and within the budget."""

from __future__ import annotations

import contextlib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.policies.seq2seq import loops_of
from poochplan.runtime.session import Session
from poochplan.workload import Workload
from poochplan.workloads.sequence import char_rnn
from poochplan.workloads.unrolled import Bahdanau, Seq2SeqSteps, State
from tests.live_bytes import LiveBytes
from tests.processes import python

CHUNKS, EPOCHS = 5, 2
FUSED, UNROLLED, PAIRS = "fused layers", "cells step by step", "pairs of sequences"
_MIB = 1 << 20


class PairsInChunks(Seq2SeqSteps):
    """Reads two long sequences in chunks: the encoder begins where it ended, and attention sees a chunk."""

    def forward(  # type: ignore[override]
        self, source: torch.Tensor, previous: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        memory, after = self._encode(self.dropout(self.embedding(source)), state)
        decoded = self._decode(self.dropout(self.embedding(previous)), memory, after)
        return self.head(self.dropout(decoded)), after


class PairSteps:
    """Each call is the loss of the next chunk, from the state that the last one left."""

    def __init__(self, model: PairsInChunks, width: int) -> None:
        data = torch.Generator().manual_seed(0)
        self.model, self.next = model, 0
        self.batches = [(torch.randint(1, 32, (8, 12), generator=data),) for _ in range(CHUNKS)]
        self.state = torch.zeros(8, width), torch.zeros(8, width)

    def __call__(self) -> torch.Tensor:
        (source,) = self.batches[self.next]
        target = source.flip(1)
        logits, state = self.model(source, torch.nn.functional.pad(target[:, :-1], (1, 0)), self.state)
        self.next = (self.next + 1) % CHUNKS
        hidden, cell = (part.detach() if self.next else torch.zeros_like(part) for part in state)
        self.state = hidden, cell
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def fresh(kind: str = FUSED) -> Workload:
    if kind == PAIRS:
        torch.manual_seed(0)
        model = PairsInChunks(32, 48, Bahdanau(48), 0.1).train()
        return Workload(model, PairSteps(model, 48), torch.optim.AdamW(model.parameters()))
    length = 64 if kind == FUSED else 12
    return char_rnn(
        batch_size=8, sequence_length=length, width=64, text="small", chunks=CHUNKS, unrolled=kind == UNROLLED
    )


def profile_of(kind: str = FUSED, **options: Any) -> Profile:
    workload = fresh(kind)
    return poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, throttle="400MB/s", **options
    )


@cache
def profiled(kind: str = FUSED) -> Profile:
    return profile_of(kind, iterations=2)


def trained(plan: Plan | None, kind: str = FUSED) -> tuple[list[torch.Tensor], list[int], Session | None]:
    """Losses, the states between chunks and the parameters at the end; each step's metered peak; the session."""
    workload = fresh(kind)
    torch.manual_seed(1)
    seen: list[torch.Tensor] = []
    peaks = []
    with contextlib.ExitStack() as stack:
        session = plan and stack.enter_context(poochplan.apply(plan, workload.model, meter="never"))
        for _ in range(EPOCHS * CHUNKS):
            workload.optimizer.zero_grad(set_to_none=True)
            kept = [t for entries in workload.optimizer.state.values() for t in entries.values()]
            chunks = workload.step
            kept += [*chunks.batches[chunks.next], *chunks.state]
            with LiveBytes(*workload.model.parameters(), *kept) as meter:
                loss = workload.step()
                loss.backward()
                workload.optimizer.step()
            peaks.append(meter.peak)
            seen += [loss.detach().clone(), *(part.clone() for part in chunks.state)]
            del loss
    return [*seen, *(parameter.detach().clone() for parameter in workload.model.parameters())], peaks, session or None


@cache
def in_core(kind: str = FUSED) -> tuple[torch.Tensor, ...]:
    return tuple(trained(None, kind)[0])


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *((policy, FUSED) for policy in ("ilp", "earliest-first", "swap-all", "recompute-all", "seq2seq")),
        *product(("seq2seq", "ilp"), (UNROLLED, PAIRS)),
    ],
)
def test_epochs_of_chunks_under_one_plan_are_bitwise_and_within_budget(policy: str, kind: str) -> None:
    profile = profiled(kind)
    assert bool(loops_of(profile)) == (kind != FUSED)
    smallest = smallest_budget(profile, without=["state"])  # which this meter would see in the host tier too
    budget = int(smallest + 0.4 * (profile.in_core_peak_bytes - smallest))
    if policy == "recompute-all":
        budget = 2 * profile.in_core_peak_bytes  # its replays take more than they save
    options: dict[str, Any] = {"evaluations": 100, "without": ["state"]} if policy == "ilp" else {}
    plan = poochplan.plan(profile, budget, policy=policy, **options)
    seen, peaks, session = trained(plan, kind)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, in_core(kind), strict=True))
    total = session.report().total
    assert (total.fallbacks, total.steps) == (0, EPOCHS * CHUNKS), total.fallback_reasons
    assert {value.decision for value in plan.values} != {Decision.KEEP}
    assert max(peaks) <= budget


def test_the_kept_state_is_neither_swapped_nor_lost_at_the_smallest_budget() -> None:
    budget = smallest_budget(profiled(), without=["state"])
    plan = poochplan.plan(profiled(), budget, evaluations=100, without=["state"])
    seen, peaks, _ = trained(plan)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, in_core(), strict=True))
    assert max(peaks) <= plan.budget_bytes


def test_a_chunk_profiled_without_memory_needs_what_a_real_one_needs() -> None:
    fake = profile_of(mode="fake")
    assert fake.inputs == profiled().inputs
    assert len(fake.inputs) == 3
    assert abs(fake.in_core_peak_bytes - profiled().in_core_peak_bytes) < 0.02 * profiled().in_core_peak_bytes + _MIB


def test_all_chunks_are_of_one_kind_to_auto(tmp_path: Path) -> None:
    told = python(
        """
        import sys
        import poochplan
        from tests.end_to_end.test_chunks_within_budget import CHUNKS, fresh

        workload = fresh()  # alone: what other tests have left would live beside the step, and the budget is a share
        with poochplan.auto(workload.model, workload.optimizer, budget="70%", cache=sys.argv[1], quiet=True) as session:
            for number in range(8 * CHUNKS):
                if number == 6 * CHUNKS:
                    session.wait_until_planned()
                workload.optimizer.zero_grad(set_to_none=True)
                workload.step().backward()
                workload.optimizer.step()
        print(session.plan is not None, session.total.fallbacks, len(session.plans))
        """,
        tmp_path,
    )
    assert told.split() == ["True", "0", "1"]

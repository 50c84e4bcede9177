"""A process that trains over an epoch, in-core or under a plan, and tells the losses; metered, and not timed.

    python -m benchmarks.epochs.loss_curve '{"what": "curve", "network": "char-rnn-small", "folder": "/tmp/plans", ...}'

What is asked is an ``Ask`` of the comparison (``benchmarks/against/asking.py``). The answer is the last line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import torch

from benchmarks.against.asking import Ask
from benchmarks.against.compared_networks import fresh
from benchmarks.against.methods import method_of
from benchmarks.against.turns import environment
from benchmarks.hooked import digest
from benchmarks.measured_steps import answer_of, arena_bytes
from poochplan.workload import Workload
from tests.allocated_bytes import allocated_bytes

from .recurrent_networks import ALL


def curve_of(ask: Ask, threads: int) -> dict[str, Any]:
    """What the process answers: losses to the last bit, a digest of the state at the end, and the highest peak."""
    words = [msgspec.json.encode(ask).decode()]
    return answer_of("benchmarks.epochs.loss_curve", words, environment(threads))


def _trained(ask: Ask) -> dict[str, Any]:
    meter = allocated_bytes()
    before_bytes = meter.live
    workload = fresh(ask.network)
    before_bytes += _waiting_bytes(workload)
    torch.manual_seed(1)
    losses, peaks = [], []
    with method_of(ask.method)(workload, ask) as running:
        work = running.workload
        assert work.optimizer is not None
        for _ in range(ALL[ask.network].curve_steps):
            work.optimizer.zero_grad(set_to_none=True)
            meter.restart()
            loss = work.step()
            loss.backward()  # type: ignore[no-untyped-call]
            work.optimizer.step()
            arena = arena_bytes(running.session) if running.session is not None else 0
            peaks.append(meter.peak - before_bytes + arena)
            losses.append(float(loss))
        ended = digest(work.model, loss)
        facts = running.facts()
    return {"losses": losses, "end": ended, "peak_bytes": max(peaks), "fallbacks": facts["fallbacks"]}


def _waiting_bytes(workload: Workload) -> int:
    """Of the chunks of text that are not a step's own: data that waits beside it, and that no budget is for."""
    batches = getattr(workload.step, "batches", ())
    return sum(tensor.nbytes for batch in batches[1:] for tensor in batch)


if __name__ == "__main__":
    print(json.dumps(_trained(msgspec.json.decode(sys.argv[1], type=Ask))))

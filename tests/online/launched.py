"""One rank of a command line: ``torchrun ... -m tests.online.launched FOLDER``; what it saw goes to ``rankN.json``."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from poochplan.errors import UsageError
from poochplan.online.ranks import BUCKET_BYTES, Ranks, data_parallel, launched_ranks
from poochplan.profiler.link import measure_link
from poochplan.workload import Workload


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    with launched_ranks() as ranks:
        facts = {
            "least": ranks.least(5 + rank),
            "on_any": [ranks.on_any(rank == 1), ranks.on_any(False)],
            "gathered": ranks.gathered(rank),
            "same": refusal(ranks, b"plan"),
            "differs": refusal(ranks, b"plan %d" % rank),
            "link": link(ranks),
            **gradients(rank, ranks),
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(facts))


def refusal(ranks: Ranks, content: bytes) -> str:
    try:
        ranks.check_same(content)
    except UsageError as error:
        return str(error)
    return ""


def link(ranks: Ranks) -> list[int]:
    """Ranks of a link that all measure, and the buckets that are reduced meanwhile."""
    cpu, rate, sizes = torch.device("cpu"), 200e6, (64 << 10,)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced, ranks.reducing(cpu) as beside:
        found = measure_link(cpu, None, rate, sizes, ranks=2, least=ranks.least, beside=beside)
    return [found.ranks, sum(call.args[0].nbytes == BUCKET_BYTES for call in reduced.call_args_list)]


def gradients(rank: int, ranks: Ranks) -> dict[str, object]:
    """Those of this rank's own batch alone, and those after backward of the wrapped model."""
    torch.manual_seed(rank)
    model, calls = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), []
    model.register_forward_hook(lambda *_: calls.append(1))
    alone, batch = copy.deepcopy(model), torch.randn(16, 8)
    workload = data_parallel(Workload(model, lambda: model(batch).square().mean()))
    alone.load_state_dict(model.state_dict())  # rank 0's, on every rank
    alone(batch).square().mean().backward()
    calls.clear()
    workload.step().backward()  # type: ignore[no-untyped-call]
    return {
        "calls": len(calls),
        "class": type(model).__name__,
        "again": data_parallel(workload).model is workload.model,
        "alone": [one.grad.tolist() for one in alone.parameters() if one.grad is not None],
        "together": [one.grad.tolist() for one in model.parameters() if one.grad is not None],
        "parameters": ranks.gathered([one.tolist() for one in model.parameters()])[0],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))

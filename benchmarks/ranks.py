"""Data-parallel training and FSDP2 on several ranks: bits, peaks by an outside meter, and plans in force on every rank.

Each network is wrapped on two gloo ranks, or more, and trained without a session. Then, with each budget, it trains
under ``poochplan.auto``, and anew under ``poochplan.apply`` with the plan that rank 0 has saved. Losses and gradients
of each step, and parameters and buffers of the last one, are compared with those of the same wrapper without a plan.
The outside hook of the tests meters each rank's steps: it counts every thread, gloo's too. Peaks are those of the last
steps.

    python -m benchmarks.ranks [--wrappers ddp,fsdp] [--networks blocks,gpt2,...] [--ranks 4] [-o FILE.json]
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import poochplan
from benchmarks.facts import MIB, Row, parser_of, table_row, taken, yes
from benchmarks.plans import decisions_of
from tests.allocated_bytes import AllocatedBytes, allocated_bytes  # on purpose none of the package
from tests.runtime.nets import LINK
from tests.torchrun import torchrun

BUDGETS = ("90%", "75%", "60%")
WRAPPERS = ("ddp", "fsdp")
STEPS, PLANNED_AT = 20, 14


Made = tuple[nn.Module, list[nn.Module], Callable[[nn.Module], torch.Tensor]]
"""A model, the parts of it that FSDP2 shards as units, and the loss of this rank's next batch."""


class Block(nn.Module):
    """A residual block of a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.inside = nn.Sequential(nn.LayerNorm(width), *inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.inside(x)
        return found


def classified(units: list[nn.Module], *head: nn.Module, shape: tuple[int, ...]) -> Made:
    def loss(wrapped: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(wrapped(torch.randn(shape)), torch.randint(10, shape[:1]))

    return nn.Sequential(*units, *head), units, loss


def blocks() -> Made:
    return classified([Block(256) for _ in range(8)], nn.Linear(256, 10), shape=(512, 256))


def convolutions() -> Made:
    widths = (3, 32, 32, 64, 64, 64)
    units: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(0.1))
        for a, b in pairwise(widths)
    ]
    return classified(units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10), shape=(8, 3, 48, 48))


def hugging(kind: str, head: str, unit: str, inputs: Callable[[], dict[str, torch.Tensor]], **config: Any) -> Made:
    """``AutoModelFor<head>`` of transformers; the units are its modules of the class ``unit``."""
    import transformers

    settings = transformers.AutoConfig.for_model(kind, **config)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(settings).train()
    units = [module for module in model.modules() if type(module).__name__ == unit]
    return model, units, lambda wrapped: wrapped(**inputs()).loss


def _text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(512, (8, 128))
    return {"input_ids": tokens, "labels": tokens}


def _sentences() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(512, (8, 128)), "labels": torch.randint(2, (8,))}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(10, (16,))}


_GPT2 = {"vocab_size": 512, "n_positions": 128, "n_embd": 128, "n_layer": 4, "n_head": 4}
_WIDTH = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_BERT = _WIDTH | {"intermediate_size": 512, "vocab_size": 512}
_LLAMA = _WIDTH | {"intermediate_size": 352, "vocab_size": 512, "max_position_embeddings": 128}
_VIT = _WIDTH | {"intermediate_size": 512, "image_size": 64, "patch_size": 8, "num_labels": 10}

NETWORKS: dict[str, Callable[[], Made]] = {
    "blocks": blocks,
    "gpt2": partial(hugging, "gpt2", "CausalLM", "GPT2Block", _text, **_GPT2),
    "bert": partial(hugging, "bert", "SequenceClassification", "BertLayer", _sentences, **_BERT),
    "convolutions": convolutions,
    "llama": partial(hugging, "llama", "CausalLM", "LlamaDecoderLayer", _text, **_LLAMA),
    "vit": partial(hugging, "vit", "ImageClassification", "ViTLayer", _images, **_VIT),
}


def wrapped(model: nn.Module, units: list[nn.Module], wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for unit in (*units, model):
        fully_shard(unit)
    return model


def no_session(*_: object) -> Any:
    return nullcontext()


def trained(name: str, wrapper: str, meter: AllocatedBytes, session_of: Callable[..., Any] = no_session) -> Any:
    """What came of one training on this rank, and its session."""
    gc.collect()
    torch.manual_seed(0)
    plain, units, loss_of = NETWORKS[name]()
    model = wrapped(plain, units, wrapper)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + torch.distributed.get_rank())
    losses, gradients, peak_bytes = [], [], 0
    with session_of(model, optimizer) as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(STEPS):
            if session is not None and number == PLANNED_AT:
                session.wait_until_planned()
            meter.restart()
            loss = loss_of(model)
            loss.backward()
            gradients.append(digest(one.grad for one in model.parameters() if one.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            peak_bytes = max(peak_bytes, meter.peak if number > PLANNED_AT else 0)
    found = {"losses": losses, "gradients": gradients, "peak_bytes": peak_bytes}
    found["bits"] = digest((*model.parameters(), *model.buffers()))
    return (found if session is None else {**found, **facts_of(session)}), session


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the bits of this rank's parts. It allocates nothing that the meter counts."""
    parts = (getattr(one, "_local_tensor", one).detach().numpy().tobytes() for one in tensors)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def planned(name: str, wrapper: str, meter: AllocatedBytes, budget: str, folder: Path) -> Row:
    """What came of the training under ``auto``, and in ``applied`` of that under ``apply``."""
    options: Row = {"quiet": True, "link": LINK, "time_limit_s": 2, "arena": "off", "cache": folder / budget}
    found, session = trained(name, wrapper, meter, lambda *both: poochplan.auto(*both, budget=budget, **options))
    if session.plan is None:
        return found  # type: ignore[no-any-return]
    file = folder / f"plan-{budget}.json"
    if torch.distributed.get_rank() == 0:
        session.plan.save(file)
    del session
    torch.distributed.barrier()
    plan = poochplan.Plan.load(file)
    found["applied"], _ = trained(name, wrapper, meter, lambda model, _: poochplan.apply(plan, model, arena="off"))
    return found  # type: ignore[no-any-return]


def facts_of(session: Any) -> Row:
    plan, total = session.plan, session.total
    if plan is None:
        return {"plan": ""}
    return {
        "plan": hashlib.sha256(repr(plan).encode()).hexdigest()[:16],
        "decisions": "/".join(map(str, decisions_of(plan).values())),
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.prediction.peak_bytes,
        "in_core_predicted_bytes": plan.prediction.in_core_peak_bytes,
        "followed": session.report().steps_followed,
        "fallbacks": total.fallbacks,
    }


def on_this_rank(folder: Path, name: str, wrapper: str) -> None:
    meter = allocated_bytes()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found = {"": trained(name, wrapper, meter)[0]}
    found |= {budget: planned(name, wrapper, meter, budget, folder) for budget in BUDGETS}
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def rows_of(wrapper: str, name: str, count: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = torchrun("benchmarks.ranks", Path(folder), name, wrapper, ranks=count)
    rows = []
    for budget in BUDGETS:
        plain, found = [rank[""] for rank in ranks], [rank[budget] for rank in ranks]
        row: Row = {"wrapper": wrapper, "network": name, "budget": budget}
        row["in_core_bytes"] = [one["peak_bytes"] for one in plain]
        row["equal"] = are_equal(plain, found)
        if found[0]["plan"]:
            facts = ("decisions", "budget_bytes", "predicted_bytes", "in_core_predicted_bytes")
            row |= {key: found[0][key] for key in facts} | in_force(found)
            applied = [one["applied"] for one in found]
            row["applied"] = in_force(applied) | {"equal": are_equal(plain, applied)}
        rows.append(row)
    return rows


def are_equal(plain: list[Row], found: list[Row]) -> bool:
    return all(a[key] == b[key] for a, b in zip(plain, found, strict=True) for key in ("losses", "gradients", "bits"))


def in_force(found: list[Row]) -> Row:
    """What the ranks did under the plan."""
    return {
        "peak_bytes": [one["peak_bytes"] for one in found],
        "followed": [one["followed"] for one in found],
        "fallbacks": sum(one["fallbacks"] for one in found),
        "one_plan": len({one["plan"] for one in found}) == 1,
    }


def is_in_force(row: Row) -> bool:
    return bool(row["one_plan"] and min(row["followed"]) > 0 and not row["fallbacks"])


def line(row: Row) -> str:
    start = [row["wrapper"], row["network"], row["budget"]]
    in_core, equal = mib(*row["in_core_bytes"]), yes(row["equal"])
    if "peak_bytes" not in row:
        return table_row(*start, "no plan fits", in_core, "-", "-", "-", "-", equal, "-")
    over_bytes, predicted = max(row["peak_bytes"]) - row["budget_bytes"], row["predicted_bytes"]
    off = max((one / predicted - 1 for one in row["peak_bytes"]), key=abs)
    return table_row(
        *(*start, row["decisions"], f"{in_core} / {mib(row['in_core_predicted_bytes'])}", mib(row["budget_bytes"])),
        f"{mib(*row['peak_bytes'])} / {mib(predicted)} ({off:+.1%})",
        "yes" if over_bytes <= 0 else f"NO, by {over_bytes} bytes",
        *(yes(is_in_force(row)), equal, told_of_applied(row["applied"], row["budget_bytes"])),
    )


def mib(*sizes_bytes: int) -> str:
    return " ".join(f"{one / MIB:.1f}" for one in sizes_bytes)


def told_of_applied(applied: Row, budget_bytes: int) -> str:
    """Whether the plan was in force in every step under ``apply``, within the budget and bitwise; and the peaks."""
    is_followed = is_in_force(applied) and min(applied["followed"]) == STEPS
    is_within = max(applied["peak_bytes"]) <= budget_bytes
    failed = {"plan": is_followed, "budget": is_within, "bits": applied["equal"]}
    wrong = " ".join(name for name, holds in failed.items() if not holds)
    return (f"NO ({wrong}): " if wrong else "yes: ") + mib(*applied["peak_bytes"])


def main() -> None:
    parser = parser_of(__doc__, wrappers=",".join(WRAPPERS), networks=",".join(NETWORKS), ranks=2)
    asked = parser.parse_args()
    cases = product(asked.wrappers.split(","), asked.networks.split(","))
    taken(asked, cases, lambda case: rows_of(*case, asked.ranks), line)


if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):
        on_this_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        main()

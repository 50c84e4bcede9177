"""Data-parallel training and FSDP2 on several ranks: bits, peaks by an outside meter, and plans in force on every rank.

Each network is wrapped on two gloo ranks, or more, and trained without a session. Then, with each budget, it trains
under ``poochplan.auto``, and anew under ``poochplan.apply`` with the plan that rank 0 has saved. Losses and gradients
of each step, and parameters and buffers of the last one, are compared with those of the same wrapper without a plan.
The outside hook of the tests meters each rank's steps: it counts every thread, gloo's too. Peaks are those of the last
steps.

    python -m benchmarks.ranks [--wrappers ddp,fsdp] [--networks blocks,gpt2,...] [--ranks 4] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import poochplan
from benchmarks.facts import facts_of_run, write_results
from tests.allocated_bytes import AllocatedBytes, allocated_bytes  # on purpose none of the package
from tests.runtime.nets import LINK
from tests.torchrun import torchrun

BUDGETS = ("90%", "75%", "60%")
WRAPPERS = ("ddp", "fsdp")
STEPS, PLANNED_AT = 20, 14
_MIB = 1 << 20


@dataclass
class Training:
    """A model, the parts of it that FSDP2 shards as units, and the loss of this rank's next batch."""

    model: nn.Module
    units: list[nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]


class Block(nn.Module):
    """A residual block of a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.inside = nn.Sequential(nn.LayerNorm(width), *inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.inside(x)
        return found


def blocks() -> Training:
    model = nn.Sequential(*[Block(256) for _ in range(8)], nn.Linear(256, 10))

    def loss(wrapped: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(wrapped(torch.randn(512, 256)), torch.randint(10, (512,)))

    return Training(model, list(model)[:-1], loss)


def convolutions() -> Training:
    widths = (3, 32, 32, 64, 64, 64)
    units = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(0.1))
        for a, b in pairwise(widths)
    ]
    model = nn.Sequential(*units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    def loss(wrapped: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(wrapped(torch.randn(8, 3, 48, 48)), torch.randint(10, (8,)))

    return Training(model, list(units), loss)


def language(model: nn.Module, blocks: Iterable[nn.Module]) -> Training:
    def loss(wrapped: nn.Module) -> torch.Tensor:
        tokens = torch.randint(512, (8, 128))
        found: torch.Tensor = wrapped(input_ids=tokens, labels=tokens).loss
        return found

    return Training(model, list(blocks), loss)


def gpt2() -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=128, n_layer=4, n_head=4))
    return language(model, model.transformer.h)


def bert() -> Training:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForSequenceClassification(BertConfig(vocab_size=512, **sizes))

    def loss(wrapped: nn.Module) -> torch.Tensor:
        found: torch.Tensor = wrapped(input_ids=torch.randint(512, (8, 128)), labels=torch.randint(2, (8,))).loss
        return found

    return Training(model, list(model.bert.encoder.layer), loss)


def llama() -> Training:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=128, **sizes))
    return language(model, model.model.layers)


def vit() -> Training:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, num_labels=10, **sizes))

    def loss(wrapped: nn.Module) -> torch.Tensor:
        pixels, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
        found: torch.Tensor = wrapped(pixel_values=pixels, labels=labels).loss
        return found

    return Training(model, [one for one in model.modules() if type(one).__name__ == "ViTLayer"], loss)


NETWORKS: dict[str, Callable[[], Training]] = {
    "blocks": blocks,
    "gpt2": gpt2,
    "bert": bert,
    "convolutions": convolutions,
    "llama": llama,
    "vit": vit,
}


def wrapped(training: Training, wrapper: str) -> nn.Module:
    """The model as the ranks train it."""
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(training.model)
    for unit in training.units:
        fully_shard(unit)
    fully_shard(training.model)
    return training.model


def no_session(*_: object) -> Any:
    return nullcontext()


def trained(name: str, wrapper: str, meter: AllocatedBytes, session_of: Callable[..., Any] = no_session) -> Any:
    """What came of one training on this rank, and its session."""
    gc.collect()
    torch.manual_seed(0)
    training = NETWORKS[name]()
    model = wrapped(training, wrapper)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + torch.distributed.get_rank())
    losses, gradients, peak_bytes = [], [], 0
    with session_of(model, optimizer) as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(STEPS):
            if session is not None and number == PLANNED_AT:
                session.wait_until_planned()
            meter.restart()
            loss = training.loss(model)
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


def planned(name: str, wrapper: str, meter: AllocatedBytes, budget: str, folder: Path) -> dict[str, Any]:
    """What came of the training under ``auto``, and in ``applied`` of that under ``apply``."""
    options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": 2, "arena": "off", "cache": folder / budget}
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


def facts_of(session: Any) -> dict[str, Any]:
    """Of the plan that this rank follows."""
    plan, total = session.plan, session.total
    if plan is None:
        return {"plan": ""}
    decisions = [value.decision for value in plan.values]
    return {
        "plan": hashlib.sha256(repr(plan).encode()).hexdigest()[:16],
        "decisions": "/".join(str(decisions.count(one)) for one in ("keep", "swap", "recompute")),
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


def rows_of(name: str, wrapper: str, count: int) -> list[dict[str, Any]]:
    """One for each budget, of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = torchrun("benchmarks.ranks", Path(folder), name, wrapper, ranks=count)
    rows = []
    for budget in BUDGETS:
        plain, found = [rank[""] for rank in ranks], [rank[budget] for rank in ranks]
        row: dict[str, Any] = {"wrapper": wrapper, "network": name, "budget": budget}
        row["in_core_bytes"] = [one["peak_bytes"] for one in plain]
        row["equal"] = are_equal(plain, found)
        if found[0]["plan"]:
            facts = ("decisions", "budget_bytes", "predicted_bytes", "in_core_predicted_bytes")
            row |= {key: found[0][key] for key in facts} | in_force(found)
            applied = [one["applied"] for one in found]
            row["applied"] = in_force(applied) | {"equal": are_equal(plain, applied)}
        rows.append(row)
    return rows


def are_equal(plain: list[dict[str, Any]], found: list[dict[str, Any]]) -> bool:
    """Whether all bits of all ranks are."""
    return all(a[key] == b[key] for a, b in zip(plain, found, strict=True) for key in ("losses", "gradients", "bits"))


def in_force(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks did under the plan."""
    return {
        "peak_bytes": [one["peak_bytes"] for one in found],
        "followed": [one["followed"] for one in found],
        "fallbacks": sum(one["fallbacks"] for one in found),
        "one_plan": len({one["plan"] for one in found}) == 1,
    }


def is_in_force(row: dict[str, Any]) -> bool:
    return bool(row["one_plan"] and min(row["followed"]) > 0 and not row["fallbacks"])


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    start = [row["wrapper"], row["network"], row["budget"]]
    in_core = " ".join(f"{one / _MIB:.1f}" for one in row["in_core_bytes"])
    equal = "yes" if row["equal"] else "NO"
    if "peak_bytes" not in row:
        return "| " + " | ".join([*start, "no plan fits", in_core, "-", "-", "-", "-", equal, "-"]) + " |"
    worst, predicted, applied = max(row["peak_bytes"]), row["predicted_bytes"], row["applied"]
    off = max((one / predicted - 1 for one in row["peak_bytes"]), key=abs)
    cells = [
        row["decisions"],
        f"{in_core} / {row['in_core_predicted_bytes'] / _MIB:.1f}",
        f"{row['budget_bytes'] / _MIB:.1f}",
        " ".join(f"{one / _MIB:.1f}" for one in row["peak_bytes"]) + f" / {predicted / _MIB:.1f} ({off:+.1%})",
        "yes" if worst <= row["budget_bytes"] else f"NO, by {worst - row['budget_bytes']} bytes",
        "yes" if is_in_force(row) else "NO",
        equal,
        told_of_applied(applied, row["budget_bytes"]),
    ]
    return "| " + " | ".join([*start, *cells]) + " |"


def told_of_applied(applied: dict[str, Any], budget_bytes: int) -> str:
    """Whether the plan was in force in every step under ``apply``, within the budget and bitwise; and the peaks."""
    is_followed = is_in_force(applied) and min(applied["followed"]) == STEPS
    is_within = max(applied["peak_bytes"]) <= budget_bytes
    failed = {"plan": is_followed, "budget": is_within, "bits": applied["equal"]}
    wrong = " ".join(name for name, holds in failed.items() if not holds)
    return (f"NO ({wrong}): " if wrong else "yes: ") + " ".join(f"{one / _MIB:.1f}" for one in applied["peak_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrappers", default=",".join(WRAPPERS))
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-o", "--output")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for wrapper in asked.wrappers.split(","):
        for name in asked.networks.split(","):
            rows += rows_of(name, wrapper, asked.ranks)
            print(*map(line, rows[-len(BUDGETS) :]), sep="\n", flush=True)
            write_results(asked.output, {**facts_of_run(asked), "rows": rows})


if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):
        on_this_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        main()

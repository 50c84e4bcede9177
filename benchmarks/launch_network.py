"""What the launch path is measured on: GPT-2 with 24 narrow layers, its plans, and what a plain step of it does."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import poochplan
from poochplan.formats.occupancy import static_bytes
from poochplan.planner.planning import smallest_budget
from poochplan.tensors.operators import traits
from tests.runtime.nets import LINK
from tests.runtime.random_plans import random_plan

FOLDER = Path(__file__).parent / "launch_plans"
SEED = 0
"""Of the parameters and the tokens, of the random plans and of the planner."""
WEIGHTS = {"keep": (1, 0, 0), "swap": (0, 1, 0), "replay": (0, 0, 1), "mixed": (1, 2, 2)}
"""Random plans by what they draw from: keep, swap, recompute. Those that recompute record all of forward."""
THIRD = "third"
"""The planner's own, at a third of what is not there all the time, or the smallest budget that has a plan."""
RECORDED = "keep-recorded"
"""Keeps everything and records all of forward: what recording takes by itself. Made from ``keep``, not a file."""
EVALUATIONS = 2000
LAYERS, WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 24, 64, 4, 32, 2, 512

Step = Callable[[], torch.Tensor]


class Counts(NamedTuple):
    """Of one plain step. Ops are those that take memory or write: views are left out, as in a profile."""

    forward_ops: int
    backward_ops: int
    views: int
    packs: int
    """Also of parameters."""

    @property
    def ops(self) -> int:
        return self.forward_ops + self.backward_ops


def network() -> tuple[nn.Module, Step]:
    """The same model each time, and its step: the loss of one fixed batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it speaks of tokens that nothing here has
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": 2 * TOKENS}
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False)
    ).train()
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[bool] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[traits(func).pure_view] += 1
        return func(*args, **(kwargs or {}))


def counted(step: Step) -> Counts:
    """Runs one plain step."""
    packs = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packs
        packs += 1
        return tensor

    with _Counting() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step()
    with _Counting() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return Counts(forward.seen[False], backward.seen[False], forward.seen[True] + backward.seen[True], packs)


def make_plans() -> None:
    """Profiles the network here and writes the plans anew."""
    model, step = network()
    profile = poochplan.profile(
        step, model=model, optimizer=torch.optim.AdamW(model.parameters()), iterations=1, link=LINK, workload="gpt2-24"
    )
    plans = {name: random_plan(profile, SEED, weights) for name, weights in WEIGHTS.items()}
    static = sum(static_bytes(profile).values())
    budget_bytes = max(static + (profile.in_core_peak_bytes - static) // 3, smallest_budget(profile))
    plans[THIRD] = poochplan.plan(profile, budget_bytes, evaluations=EVALUATIONS, seed=SEED)
    FOLDER.mkdir(exist_ok=True)
    for name, plan in plans.items():
        print(f"Wrote {plan.save(_path(name), force=True)}")


def load_plan(name: str) -> poochplan.Plan:
    """A committed plan, or ``RECORDED``."""
    if name == RECORDED:
        return msgspec.structs.replace(load_plan("keep"), record_from_start=True)
    return poochplan.Plan.load(_path(name))


def _path(name: str) -> Path:
    return FOLDER / f"{name}.json.gz"

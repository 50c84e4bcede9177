"""Torch's databases of samples, each as a training: five steps plain and under plans, equal to the bit?

An operator (``op_db``, ``hop_db``, ``custom_op_db``, ``autograd_function_db``) stands amid a small network, so that
what it takes and gives is saved and may be swapped and recomputed: in float32, bfloat16 and complex64 where it has
that, within bfloat16 autocast, and in its variant that writes in place. A module (``module_db``) trains as it is, and
so does a network under each of the optimizers of ``optim_db``. Plans and comparison are those of ``training.py``: an
arena serves from the third step on. With ``--auto`` it trains under ``poochplan.auto`` instead, through all its stages.

Each operator and kind is an entry, of which one sample is drawn by the seed. A call tries a share of the entries, in
an order that the seed says, and goes on where the file ends. ``expecttest`` has to be installed.

    python -m benchmarks.judges.databases -o benchmarks/results/judges/databases.json --share 100
    python -m benchmarks.judges.databases -o benchmarks/results/judges/auto.json --auto --share 200
    python -m benchmarks.judges.databases --only linalg.svd nn.functional.dropout --kinds float32 inplace
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db

from benchmarks.facts import facts_of_run, write_results
from benchmarks.judges.training import Make, Training, judged, judged_under_auto, run
from poochplan.torch_private.tensor_internals import pytree

OPERATORS = {
    "op_db": op_db,
    "hop_db": hop_db,
    "custom_op_db": custom_op_db,
    "autograd_function_db": autograd_function_db,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "complex64": torch.complex64}
KINDS = (*DTYPES, "autocast", "inplace")
"""How an operator is tried; modules in float32 and within autocast. The last two take float32."""
MOST_NUMBERS, LIMIT_S, BATCH, ROWS, OFTEN = 1 << 16, 60, 256, 8, 50


class NotTried(Exception):  # noqa: N818 - no failure of ours
    """Why there is no training of it."""


@dataclass(frozen=True)
class Entry:
    """One of a database, in one dtype."""

    database: str
    name: str
    kind: str
    info: Any


class Amid(nn.Module):
    """An operator on copies of its tensors, before a network at whose peak what it has saved may be away; mean squares
    of both.
    """

    def __init__(self, call: Callable[..., Any], given: Any, *, autocast: bool) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(given)
        self.call, self.autocast = call, autocast
        self.head = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(ROWS, ROWS), nn.Tanh())))
        takes = [isinstance(one, torch.Tensor) and one.requires_grad for one in leaves]
        self.own = nn.ParameterList(
            nn.Parameter(one.detach().clone()) for one, is_own in zip(leaves, takes, strict=True) if is_own
        )
        self.leaves = [None if is_own else _copied(one) for one, is_own in zip(leaves, takes, strict=True)]
        self.takes = takes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        own = iter(self.own)
        leaves = [
            next(own) * 1 if is_own else _copied(one) for one, is_own in zip(self.leaves, self.takes, strict=True)
        ]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        around = torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with around:
            found = pytree.tree_leaves(self.call(first, *args, **kwargs))
        total = self.head(rows).square().mean()
        for one in found:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                real = torch.view_as_real(one.resolve_conj()) if one.is_complex() else one
                total = total + real.float().sin().square().mean()
        return total


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def entries(kinds: Sequence[str] = KINDS) -> list[Entry]:
    """All of these kinds."""
    found = []
    for database, infos in OPERATORS.items():
        for info in infos:
            name = ".".join(filter(None, (info.name, info.variant_test_name)))
            dtypes = info.supported_backward_dtypes("cpu")
            has = [kind for kind in KINDS if DTYPES.get(kind, torch.float32) in dtypes]
            if not getattr(info, "inplace_variant", None) or not info.supports_inplace_autograd:
                has = [kind for kind in has if kind != "inplace"]
            found += [Entry(database, name, kind, info) for kind in has]
    for kind in ("float32", "autocast"):
        found += [Entry("module_db", info.module_cls.__name__, kind, info) for info in module_db]
    found += [Entry("optim_db", info.optim_cls.__name__, "float32", info) for info in optim_db]
    return [one for one in found if one.kind in kinds]


def training_of(entry: Entry, chance: random.Random) -> Make:
    """One sample of it, drawn."""
    torch.manual_seed(0)
    if entry.database == "optim_db":
        return _of_optimizer(entry.info, chance)
    if entry.database == "module_db":
        return _of_module(entry, chance)
    drawn = entry.info.sample_inputs("cpu", DTYPES.get(entry.kind, torch.float32), requires_grad=True)
    writes = entry.kind == "inplace"
    samples = [one for one in drawn if _is_small(one) and not (writes and one.broadcasts_input)]
    if not samples:
        raise NotTried("no small dense sample")
    sample = chance.choice(samples)
    given = (sample.input, sample.args, sample.kwargs)

    def make() -> Training:
        op = entry.info.inplace_variant if writes else entry.info.op
        model, rows = Amid(op, given, autocast=entry.kind == "autocast"), torch.ones(BATCH, ROWS)
        return Training(model, lambda: model(rows))

    return make


def _is_small(sample: Any) -> bool:
    leaves = [one for one in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_tensor(one)]
    dense = all(one.layout is torch.strided and not one.is_nested for one in leaves)
    return dense and sum(one.numel() for one in leaves) <= MOST_NUMBERS


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _of_module(entry: Entry, chance: random.Random) -> Make:
    info = entry.info
    given = list(info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True))
    given = [one for one in given if one.forward_input is not None]
    if not given:
        raise NotTried("it has no forward")
    sample = chance.choice(given)

    def make() -> Training:
        inner = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        if isinstance(inner, nn.modules.lazy.LazyModuleMixin):
            raise NotTried("its parameters come with the first call")
        taken = (sample.forward_input.args, sample.forward_input.kwargs)
        model = Amid(lambda _, args, kwargs: inner(*args, **kwargs), (0, taken, {}), autocast=entry.kind == "autocast")
        model.inner = inner.train()
        rows = torch.ones(BATCH, ROWS)
        return Training(model, lambda: model(rows))

    return make


def _of_optimizer(info: Any, chance: random.Random) -> Make:
    if info.step_requires_closure:
        raise NotTried("its step takes a closure")
    if info.only_supports_sparse_grads:
        raise NotTried("it takes sparse gradients alone")
    settings = chance.choice(list(info.optim_inputs_func("cpu"))).kwargs

    def make() -> Training:
        with_bias = info.optim_cls is not torch.optim.Muon  # which takes matrices alone
        layers = [nn.Linear(ROWS, ROWS, bias=with_bias) for _ in range(2)]
        model = nn.Sequential(layers[0], nn.GELU(), nn.Dropout(0.2), layers[1])
        rows = torch.randn(4 * ROWS, ROWS)
        return Training(model, lambda: model(rows).square().mean(), partial(info.optim_cls, **settings))

    return make


TRAINED = 20
"""Steps that plain torch has to survive: a profile trains about as many, and values may leave what an op takes."""


def tried(entry: Entry, seed: int, judge: Callable[[Make, int], dict[str, Any]] = judged) -> dict[str, Any]:
    """What is found of one entry."""
    chance = random.Random(f"{seed} {entry.database} {entry.name} {entry.kind}")
    try:
        make = training_of(entry, chance)
        run(make, steps=TRAINED)
    except NotTried as reason:
        return {"status": "not tried", "reason": str(reason)}
    except Exception as error:
        return {"status": "fails plain", "reason": _line(error)}
    try:
        with limited(LIMIT_S):
            return judge(make, seed)
    except Exception as error:
        ours = type(error).__module__.startswith("poochplan")
        return {"status": "refused" if ours else "raised", "reason": _line(error)}


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises ``TimeoutError`` after so many seconds of CPU time."""

    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def run_share(
    every: list[Entry],
    share: int,
    seed: int,
    found: dict[str, Any],
    judge: Callable[[Make, int], dict[str, Any]] = judged,
    write: Callable[[], None] = lambda: None,
) -> list[str]:
    """Tries so many that have not been tried, and enters what was found; names those that are wrong."""
    every = sorted(every, key=lambda one: random.Random(f"{seed} {one.database} {one.name} {one.kind}").random())
    wrong = []
    for entry in every[found["tried"] : found["tried"] + share]:
        forget()
        one = tried(entry, seed, judge)
        name, status = f"{entry.database} {entry.name} {entry.kind}", one["status"]
        counts = found["counts"].setdefault(f"{entry.database} {entry.kind}", {})
        counts[status] = counts.get(status, 0) + 1
        found["tried"] += 1
        plans = one.get("plans", {})
        found["served"] += bool(plans) and all(
            facts["served_bytes"] for kind, facts in plans.items() if kind != "solved" or len(plans) == 4
        )
        found["followed"] += any(facts.get("followed") for facts in plans.values())
        found["fallbacks"] = dict(
            Counter(found["fallbacks"]) + Counter(facts["fallback"] for facts in plans.values() if facts["fallbacks"])
        )
        if status not in ("equal", "not tried", "fails plain"):
            differences = [f"{kind}: {facts['difference']}" for kind, facts in plans.items() if "difference" in facts]
            found["named"].append(f"{name}: {status}: {one.get('reason') or '; '.join(differences)}")
            print(found["named"][-1], flush=True)
        if status in ("different", "raised", "refused"):
            wrong.append(name)
        if not found["tried"] % OFTEN:
            write()
    return wrong


def forget() -> None:
    """Drops what torch notes at each seed for devices that are not there, with the caller's stack, and what is to stay
    goes out of the collector's sight: a session looks at all that it knows.
    """
    torch.cuda._queued_calls.clear()
    torch.xpu._queued_calls.clear()
    gc.collect()
    gc.freeze()


def nothing_yet() -> dict[str, Any]:
    """Before the first share. ``followed`` is of ``auto``, whose plans may not fit."""
    return {"tried": 0, "served": 0, "followed": 0, "counts": {}, "fallbacks": {}, "named": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=1 << 20, help="at most so many that have not been tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--auto", action="store_true", help="under poochplan.auto, in place of plans")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every = [one for one in entries(given.kinds) if not given.only or one.name in given.only]
    found = nothing_yet() | {"of": len(every), "seconds": 0}
    if given.output and given.output.exists():
        found = json.loads(given.output.read_text())["found"]
    began_s = time.perf_counter()
    before_s = found["seconds"]

    def write() -> None:
        found["seconds"] = before_s + round(time.perf_counter() - began_s)
        write_results(given.output, facts_of_run(given) | {"found": found})

    judge = judged_under_auto if given.auto else judged
    wrong = run_share(every, given.share, given.seed, found, judge, write)
    write()
    print(json.dumps(found["counts"]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

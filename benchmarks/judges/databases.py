"""Torch's databases of samples, each as a training: five steps plain and under plans, equal to the bit?

An operator (``op_db``, ``hop_db``, ``custom_op_db``, ``autograd_function_db``) stands amid a small network, so that
what it takes and gives is saved and may be swapped and recomputed: in float32, in complex64 where it has that, and
within bfloat16 autocast. A module (``module_db``) trains as it is, and so does a network under each of the optimizers
of ``optim_db``. Plans and comparison are those of ``training.py``: an arena serves from the third step on.

Each operator and dtype is an entry, of which one sample is drawn by the seed. A call tries a share of the entries, in
an order that the seed says, and goes on where the file ends. ``expecttest`` has to be installed.

    python -m benchmarks.judges.databases -o benchmarks/results/judges/databases.json --share 100
    python -m benchmarks.judges.databases --only linalg.svd nn.functional.dropout
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
from collections.abc import Callable, Iterator
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
from benchmarks.judges.training import Make, Training, judged
from poochplan.torch_private.tensor_internals import pytree

OPERATORS = {
    "op_db": op_db,
    "hop_db": hop_db,
    "custom_op_db": custom_op_db,
    "autograd_function_db": autograd_function_db,
}
MOST_NUMBERS, LIMIT_S, ROWS = 1 << 16, 60, 8


class NotTried(Exception):  # noqa: N818 - no failure of ours
    """Why there is no training of it."""


@dataclass(frozen=True)
class Entry:
    """One of a database, in one dtype."""

    database: str
    name: str
    kind: str
    """float32, complex64 or autocast."""
    info: Any


class Amid(nn.Module):
    """An operator on copies of its tensors, and the mean squares of what it gives."""

    def __init__(self, call: Callable[..., Any], given: Any, *, autocast: bool) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(given)
        self.call, self.autocast = call, autocast
        self.head = nn.Linear(ROWS, ROWS)
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
        total = self.head(rows).tanh().square().mean()
        for one in found:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                real = torch.view_as_real(one.resolve_conj()) if one.is_complex() else one
                total = total + real.float().sin().square().mean()
        return total


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def entries() -> list[Entry]:
    """All of them."""
    found = []
    for database, infos in OPERATORS.items():
        for info in infos:
            name = ".".join(filter(None, (info.name, info.variant_test_name)))
            dtypes = info.supported_backward_dtypes("cpu")
            if torch.float32 in dtypes:
                found += [Entry(database, name, kind, info) for kind in ("float32", "autocast")]
            if torch.complex64 in dtypes:
                found.append(Entry(database, name, "complex64", info))
    for kind in ("float32", "autocast"):
        found += [Entry("module_db", info.module_cls.__name__, kind, info) for info in module_db]
    return found + [Entry("optim_db", info.optim_cls.__name__, "float32", info) for info in optim_db]


def training_of(entry: Entry, chance: random.Random) -> Make:
    """One sample of it, drawn."""
    torch.manual_seed(0)
    if entry.database == "optim_db":
        return _of_optimizer(entry.info, chance)
    if entry.database == "module_db":
        return _of_module(entry, chance)
    dtype = torch.complex64 if entry.kind == "complex64" else torch.float32
    samples = [one for one in entry.info.sample_inputs("cpu", dtype, requires_grad=True) if _is_small(one)]
    if not samples:
        raise NotTried("no small dense sample")
    sample = chance.choice(samples)
    given = (sample.input, sample.args, sample.kwargs)

    def make() -> Training:
        model, rows = Amid(entry.info.op, given, autocast=entry.kind == "autocast"), torch.ones(4, ROWS)
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
        rows = torch.ones(4, ROWS)
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


def tried(entry: Entry, seed: int) -> dict[str, Any]:
    """What is found of one entry."""
    chance = random.Random(f"{seed} {entry.database} {entry.name} {entry.kind}")
    try:
        make = training_of(entry, chance)
        torch.manual_seed(0)
        make().loss_of().backward()  # type: ignore[no-untyped-call]
    except NotTried as reason:
        return {"status": "not tried", "reason": str(reason)}
    except Exception as error:
        return {"status": "fails plain", "reason": _line(error)}
    try:
        with limited(LIMIT_S):
            return judged(make, seed)
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


def run_share(every: list[Entry], share: int, seed: int, found: dict[str, Any]) -> list[str]:
    """Tries so many that have not been tried, and enters what was found; names those that are wrong."""
    every = sorted(every, key=lambda one: random.Random(f"{seed} {one.database} {one.name} {one.kind}").random())
    wrong = []
    for entry in every[found["tried"] : found["tried"] + share]:
        one = tried(entry, seed)
        name, status = f"{entry.database} {entry.name} {entry.kind}", one["status"]
        counts = found["counts"].setdefault(entry.database, {})
        counts[status] = counts.get(status, 0) + 1
        found["tried"] += 1
        plans = one.get("plans", {})
        found["served"] += bool(plans) and all(
            facts["served_bytes"] for kind, facts in plans.items() if kind != "solved" or len(plans) == 4
        )
        found["fallbacks"] = dict(
            Counter(found["fallbacks"]) + Counter(facts["fallback"] for facts in plans.values() if facts["fallbacks"])
        )
        if status not in ("equal", "not tried", "fails plain"):
            differences = [f"{kind}: {facts['difference']}" for kind, facts in plans.items() if "difference" in facts]
            found["named"].append(f"{name}: {status}: {one.get('reason') or '; '.join(differences)}")
            print(found["named"][-1], flush=True)
        if status in ("different", "raised", "refused"):
            wrong.append(name)
    return wrong


def nothing_yet() -> dict[str, Any]:
    """Before the first share."""
    return {"tried": 0, "served": 0, "counts": {}, "fallbacks": {}, "named": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=1 << 20, help="at most so many that have not been tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every = [one for one in entries() if not given.only or one.name in given.only]
    found = nothing_yet() | {"of": len(every), "seconds": 0}
    if given.output and given.output.exists():
        found = json.loads(given.output.read_text())["found"]
    gc.freeze()  # a session looks at all that the collector knows, and these are many
    began_s = time.perf_counter()
    wrong = run_share(every, given.share, given.seed, found)
    found["seconds"] += round(time.perf_counter() - began_s)
    write_results(given.output, facts_of_run(given) | {"found": found})
    print(json.dumps(found["counts"]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

"""Torch's database of operators: is a backward that is metered, swapped or studied the plain one, to the bit?

Each sample of ``torch.testing._internal``'s ``op_db``, in each dtype that has a backward, is a step: forward, and a
backward from seeded gradients. It runs plain, twice, so that what does not repeat itself is known; in a session that
meters each step and swaps what it saves (its plan is another step's); in one that records all of forward and replays
what it can of what is saved (``POOCH_TAPE=python``: on the tape of Python); and under both observers of ``auto``'s
study that look at ops. Results and gradients are compared as bytes. With ``--modes`` the same is asked of a plain step
under an empty dispatch mode: what a session would change that had one on the stack.

    python -m benchmarks.judges.op_db -o benchmarks/results/op_db.json
    python -m benchmarks.judges.op_db --most 1000 --only prod masked.prod linalg.lstsq
    python -m benchmarks.judges.op_db --modes --only prod masked.prod linalg.lstsq
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import poochplan
from benchmarks.facts import facts_of_run, write_results
from poochplan.formats.plan import Decision
from poochplan.formats.profile_parts import Link, LinkDirection
from poochplan.profiler.live.after_capture import OpTiming
from poochplan.profiler.live.capturing import Capturing
from poochplan.profiler.live.loop_observer import LoopObserver, NoPlans
from poochplan.profiler.live.segment_observer import SegmentObserver
from poochplan.profiler.live.step_kinds import Loop
from poochplan.profiler.live.study import StudyOptions
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.plan_source import PlanSource
from poochplan.runtime.replays.replay import NotReplayable, StorageRecord
from poochplan.runtime.session import Session
from poochplan.runtime.step_policies.step_policy import Actions, StepPolicy, SwapEach
from poochplan.torch_private.tensor_internals import pytree

SEED, MOST_NUMBERS = 0, 1 << 16
CPU = torch.device("cpu")
Bits = list[bytes]
LINE = LinkDirection(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
LINK = Link(name="none", outward=LINE, inward=LINE)


class Operator(nn.Module):
    """Calls what it is given; a session needs a model with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, call: Callable[[], Any] | torch.Tensor) -> Any:
        return self.linear(call) if isinstance(call, torch.Tensor) else call()


class Sample:
    """One sample of an operator. Each step runs on copies of its arguments."""

    def __init__(self, name: str, op: Any, sample: Any) -> None:
        self.name, self.op = name, op
        self.given = (sample.input, sample.args, sample.kwargs)

    def step(self, model: nn.Module) -> Bits:
        """What forward gives and the gradients of all arguments that take one."""
        torch.manual_seed(SEED)
        given = pytree.tree_map(_copied, self.given)
        first, args, kwargs = given
        results = model(lambda: self.op(first, *args, **kwargs))
        outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
        found = [_bits(x) for x in outputs]
        roots = [x for x in outputs if x.requires_grad and x.grad_fn is not None]
        if not roots:
            raise NoBackward
        torch.autograd.backward(roots, [_gradient(x) for x in roots])
        leaves = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
        return found + [b"" if x.grad is None else _bits(x.grad) for x in leaves]


class NoBackward(Exception):  # noqa: N818 - no failure
    """Nothing of it takes a gradient."""


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, torch.Generator) else copy.deepcopy(leaf)
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _gradient(of: torch.Tensor) -> torch.Tensor:
    if of.layout is not torch.strided or of.is_nested:
        return torch.ones_like(of)
    numbers = torch.rand(of.shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return (numbers + 0.5).to(of.dtype)


def _bits(tensor: torch.Tensor) -> bytes:
    """As they lie in memory, row by row; of sparse and nested tensors those of what they are made of."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return b"".join(map(_bits, tensor.unbind()))
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def samples(most: int, only: list[str]) -> Iterator[Sample]:
    """Of each operator and dtype with a backward at most so many samples, from all over its list."""
    for info in op_db:
        if only and info.name not in only:
            continue
        for dtype in sorted(info.supported_backward_dtypes("cpu"), key=str):
            name = f"{info.name}{f'.{info.variant_test_name}' if info.variant_test_name else ''}"
            try:
                torch.manual_seed(SEED)
                drawn = list(info.sample_inputs("cpu", dtype, requires_grad=True))
            except Exception as error:  # of the database, not of ours
                print(f"{name} {dtype}: no samples ({type(error).__name__})", file=sys.stderr)
                continue
            small = [number for number, sample in enumerate(drawn) if _numbers(sample) <= MOST_NUMBERS]
            for number in small[:: -(-len(small) // most) or 1]:
                yield Sample(f"{name}[{number}] {str(dtype).removeprefix('torch.')}", info.op, drawn[number])


def _numbers(sample: Any) -> int:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_nested)


class Studying(LoopObserver):
    """Has each segment observed."""

    def __init__(self, model: nn.Module, new: Callable[[Any], SegmentObserver]) -> None:
        wanted = StudyOptions(link=lambda: LINK, fits=lambda _: True, with_costs=lambda profile, _: profile)
        super().__init__(Loop(model, [], CPU), wanted, NoPlans())
        self._new, self.observed = new, 0

    def _chosen(self, segment: Segment) -> StepPolicy | None:
        if segment.inputs is None and not segment.saves_next:
            return None
        self.observed += 1
        self._observer = self._new(self.context)
        return self._observer.policy


@contextlib.contextmanager
def studied(new: Callable[[Any], SegmentObserver]) -> Iterator[nn.Module]:
    """A model each of whose steps is studied so."""
    model = Operator()
    observer = Studying(model, new)
    with Session({"": model}, CPU, CpuDevice, NoPlans(), observer, meter="never"):
        yield model
    assert observer.observed, "no step was studied"


@contextlib.contextmanager
def metered() -> Iterator[nn.Module]:
    """A model whose steps are metered, and swapped, since they are not the planned one."""
    model, batch = Operator(), torch.zeros(2, 4)
    profile = poochplan.profile(lambda: model(batch).square().mean(), model=model, iterations=1, link=LINK)
    plan = poochplan.plan(profile, "100%", evaluations=1)
    with poochplan.apply(plan, model, meter="always", force=True):
        yield model


class ReplayEach(SwapEach):
    """Recomputes each value that has a recipe, and swaps the others."""

    def begin(self, segment: Segment) -> Actions:
        return super().begin(segment)._replace(record=True)

    def saved(self, index: int | None, ordinal: int, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        decision = super().saved(index, ordinal, tensor, record)
        return Decision.RECOMPUTE if decision is Decision.SWAP and record.is_born else decision

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        return self.take([value])


class Replaying(PlanSource):
    """Gives each segment such a policy."""

    def choose(self, segment: Segment) -> StepPolicy:
        return ReplayEach(at_once=True)


@contextlib.contextmanager
def replayed() -> Iterator[nn.Module]:
    """A model whose forward is recorded, and what it saves replayed."""
    model = Operator()
    with Session({"": model}, CPU, CpuDevice, Replaying(), meter="never") as session:
        session._attachment.engine.fallbacks.silent = True
        yield model
        print(f"replayed values: {session.report().total.replayed_values}, on {type(session._attachment.engine.tape)}")


class _Nothing(TorchDispatchMode):
    """Looks on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def looked_on() -> Iterator[nn.Module]:
    """A model whose steps an empty mode looks on."""
    with _Nothing():
        yield Operator()


def judged(tried: list[Sample], *, modes: bool) -> dict[str, Any]:
    """How many samples were tried, and which differ, by judge."""
    judges = {
        "metered": metered,
        "replayed": replayed,
        "captured": lambda: studied(Capturing),
        "timed": lambda: studied(_timed),
    }
    if modes:
        judges = {"under an empty mode": looked_on}
    counts, problems = Counter[str](), dict[str, list[str]]((name, []) for name in judges)
    wanted = dict(_plain(tried, counts))
    for name, judge in judges.items():
        with judge() as model:
            for sample, bits in wanted.items():
                counts[name] += 1
                try:
                    if sample.step(model) != bits:
                        problems[name].append(f"{sample.name}: other bits")
                except Exception as error:
                    problems[name].append(f"{sample.name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        print(f"{name}: {counts[name]} samples, {len(problems[name])} problems", flush=True)
    return {"counts": dict(counts), "problems": problems}


def _plain(tried: list[Sample], counts: Counter[str]) -> Iterator[tuple[Sample, Bits]]:
    """The bits of those that have a backward and repeat themselves."""
    model = Operator()
    for sample in tried:
        try:
            bits, again = sample.step(model), sample.step(model)
        except NoBackward:
            counts["without a backward"] += 1
            continue
        except Exception:  # torch's own, without us
            counts["fails plain"] += 1
            continue
        if bits == again:
            yield sample, bits
        else:
            counts["does not repeat itself"] += 1


def _timed(context: Any) -> SegmentObserver:
    return OpTiming(context, SwapEach(at_once=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=3, help="samples of each operator and dtype")
    parser.add_argument("--only", nargs="*", default=[], metavar="OP")
    parser.add_argument("--modes", action="store_true", help="ask it of an empty dispatch mode alone")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    began_s = time.perf_counter()
    tried = list(samples(given.most, given.only))
    gc.freeze()  # a session looks at all that the collector knows, and these are many
    found = judged(tried, modes=given.modes)
    for name, problems in found["problems"].items():
        for problem in problems:
            print(f"{name}: {problem}")
    write_results(given.output, facts_of_run(given) | found | {"seconds": round(time.perf_counter() - began_s)})
    raise SystemExit(any(found["problems"].values()))


if __name__ == "__main__":
    main()

"""What users of other tools have reported, each as a small program: plain, as reported, and under poochplan.

Each program runs by PyTorch alone; under the tool of the report, where it runs without a GPU; by the mechanism that the
report names, in a few lines of our own, where that says more; and under plans that swap, recompute, and mix both,
with copies as late as their events allow (the tests' adversarial device) and served from an arena on the CPU's.
Outputs, gradients and parameters of five steps are compared as bytes with plain ones.

    python -m benchmarks.judges.others_bugs -o benchmarks/results/judges/others-bugs.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import poochplan
from benchmarks.facts import facts_of_run, write_results
from benchmarks.judges.training import Make, Training, digest, plans_of, profile_of, run
from tests.runtime.conftest import adversarial_sessions

WIDTH, ROWS = 64, 64
Tensor = torch.Tensor
KINDS = ("swap", "recompute", "mixed")


class Net(nn.Module):
    """Linear layers around what is tried."""

    def __init__(self, body: Callable[[Tensor, list[nn.Linear]], Tensor], layers: int) -> None:
        super().__init__()
        self.body = body
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows, list(self.layers))  # type: ignore[arg-type]


def of_body(body: Callable[[Tensor, list[nn.Linear]], Tensor], layers: int = 3) -> Make:
    def make() -> Training:
        model, rows = Net(body, layers), torch.randn(ROWS, WIDTH)
        return Training(model, lambda: model(rows).square().mean())

    return make


def dropped(rows: Tensor, layers: list[nn.Linear]) -> Tensor:
    for layer in layers:
        rows = nn.functional.dropout(layer(rows).tanh(), 0.5)
    return rows


def transposed(rows: Tensor, layers: list[nn.Linear]) -> Tensor:
    """A square tensor is saved, and so is its transpose, which begins at the same address."""
    square = layers[0](rows).tanh()
    return layers[1](square @ square.t() @ layers[2](square))


def addresses_again(rows: Tensor, layers: list[nn.Linear]) -> Tensor:
    """What was saved is let go of as soon as it is off the device, and the next tensor gets its address."""
    for layer in layers:
        rows = layer(rows).exp().sin()
    return rows


def views_alone(rows: Tensor, layers: list[nn.Linear]) -> Tensor:
    """Only views are saved: nothing else holds their storages."""
    for layer in layers:
        left, right = layer(rows).repeat(1, 2).chunk(2, dim=1)
        rows = left.sigmoid() * right.t().t()
    return rows


def unused_branch(rows: Tensor, layers: list[nn.Linear]) -> Tensor:
    """Half of what is saved never goes backward."""
    for layer in layers:
        layer(rows).exp().sin()
        rows = layer(rows).tanh()
    return rows


# --- Under that tool --------------------------------------------------------------------------------------------------


def compiler_budgets() -> dict[str, Any]:
    """The same compiled model, with everything saved and with budgets below 1, from one seed."""
    import torch._functorch.config as config

    def step(budget: float) -> tuple[str, str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        training = of_body(dropped)()
        compiled = torch.compile(training.model, backend="aot_eager_decomp_partition")
        rows = torch.randn(ROWS, WIDTH)
        with config.patch(activation_memory_budget=budget):  # type: ignore[attr-defined]
            found = compiled(rows)
            found.square().mean().backward()
        return digest([found]), digest([p.grad for p in training.model.parameters() if p.grad is not None])

    kept = step(1.0)
    wrong = {}
    for budget in (0.0, 0.1, 0.3, 0.5):
        outputs, gradients = step(budget)
        if outputs == kept[0] and gradients != kept[1]:
            wrong[str(budget)] = "same outputs, other gradients"
    said = f"budgets {', '.join(wrong)}: same outputs as with everything saved, other gradients" if wrong else ""
    return {
        "name": "torch.compile, activation_memory_budget (partitioner without Inductor)",
        "right": not wrong,
        "said": said,
    }


# --- By the mechanism that a report names -----------------------------------------------------------------------------


@contextlib.contextmanager
def keyed(key: Callable[[Tensor], Any]) -> Iterator[None]:
    """Saved tensors lie in a table, one copy for each key, and come back in the shape in which they were saved."""
    held: dict[Any, Tensor] = {}
    host, used = torch.empty(1 << 22), [0]  # copies take no address that a tensor has given back

    def copied(tensor: Tensor) -> Tensor:
        used[0] += tensor.numel()
        return host[used[0] - tensor.numel() : used[0]].view(tensor.shape).copy_(tensor.detach())

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or not tensor.numel():
            return tensor
        if key(tensor) not in held:
            held[key(tensor)] = copied(tensor)
        return key(tensor), tensor.shape

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else held[packed[0]].reshape(packed[1])

    with saved_tensors_hooks(pack, unpack):
        yield


def by_key(make: Make, key: Callable[[Tensor], Any]) -> bool | None:
    """Whether gradients are plain's where saved tensors are told apart so; None where it raises."""
    found = []
    for around in (contextlib.nullcontext, lambda: keyed(key)):
        torch.manual_seed(0)
        training = make()
        try:
            with around():
                loss = training.loss_of()
                loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return None
        found.append(digest(p.grad for p in training.model.parameters() if p.grad is not None))
    return found[0] == found[1]


def address_and_dtype(tensor: Tensor) -> Any:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


# --- Under poochplan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bug:
    """A report, and the program that it is reduced to."""

    threads: tuple[str, ...]
    reported: str
    make: Make
    tool: Callable[[], dict[str, Any]]
    key: Callable[[Tensor], Any] | None = None
    """How the mechanism that is named tells saved tensors apart."""
    more: dict[str, Callable[[Make], bool]] = field(default_factory=dict)
    """What else has to hold under poochplan, by name."""


def elsewhere(name: str, needs: str) -> Callable[[], dict[str, Any]]:
    return lambda: {"name": name, "right": None, "said": f"not run here: {needs}"}


def equal_under_plans(make: Make) -> dict[str, bool]:
    """By kind of plan and device: whether all bytes are plain's."""
    plain, _ = run(make)
    plans = plans_of(profile_of(make))
    found = {}
    for kind in KINDS:
        served, report = run(make, plans[kind], arena="on")
        found[f"{kind}, from an arena"] = served == plain and report.total.served_bytes > 0
        with adversarial_sessions():
            late, _ = run(make, plans[kind])
        found[f"{kind}, copies as late as may be"] = late == plain
    return found


def moves_all_bytes(make: Make) -> bool:
    """Every step moves the bytes of all storages that a plan swaps, views or not."""
    plan = plans_of(profile_of(make))["swap"]
    _, report = run(make, plan)
    wanted = sum(value.size_bytes for value in plan.values if value.decision == "swap")
    return bool(report.last_step.out_bytes == report.last_step.in_bytes == wanted > 0)


def leaks_nothing(make: Make) -> bool:
    """As many tensors after 12 steps as after 3."""
    plan, training, counts = plans_of(profile_of(make))["swap"], make(), []
    with poochplan.apply(plan, training.model):
        for number in range(12):
            training.model.zero_grad(set_to_none=True)
            training.loss_of().backward()  # type: ignore[no-untyped-call]
            if number in (2, 11):
                gc.collect()
                counts.append(sum(issubclass(type(one), Tensor) for one in gc.get_objects()))
    return counts[0] == counts[1]


def goes_back_outside(make: Make) -> bool:
    """A backward behind the block gives plain's gradients."""
    plan, found = plans_of(profile_of(make))["swap"], []
    for around in (lambda _: contextlib.nullcontext(), lambda model: poochplan.apply(plan, model)):
        torch.manual_seed(0)
        training = make()
        with around(training.model):
            loss = training.loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(digest(p.grad for p in training.model.parameters() if p.grad is not None))
    return found[0] == found[1]


OFFLOADS = "OffloadActivations"
BUGS = {
    "dropout drawn anew by a compiler's budget": Bug(
        ("pytorch#190758", "pytorch#190717"),
        "a random op that the partitioner has backward compute again draws other numbers",
        of_body(dropped),
        compiler_budgets,
    ),
    "an address that comes again": Bug(
        ("trl#6241",),
        "storages are told apart by pointers, which the allocator hands out again: new tensors pass for old ones",
        of_body(addresses_again, layers=12),
        elsewhere(f"trl, {OFFLOADS}", "it is made for accelerators"),
        key=address_and_dtype,
    ),
    "a square tensor and its transpose": Bug(
        ("ms-swift#10157",),
        "saved tensors are told apart by address and dtype, so a transpose comes back as the tensor itself",
        of_body(transposed),
        elsewhere("ms-swift, activation offloading", "it is made for accelerators"),
        key=address_and_dtype,
    ),
    "views whose base is not saved": Bug(
        ("DeepSpeed#8387",),
        "a saved view is skipped though nothing else holds its storage, so its bytes stay",
        of_body(views_alone),
        elsewhere("DeepSpeed, DeepCompile", "it is made for accelerators"),
        more={"every byte is moved": moves_all_bytes},
    ),
    "a copy that is late": Bug(
        ("torchtune#1867",),
        "a tensor is let go of while another stream still uses it, and gradients are NaN",
        of_body(addresses_again, layers=12),
        elsewhere(f"torchtune, {OFFLOADS}(use_streams=True)", "it is made for CUDA streams"),
    ),
    "a branch that never goes backward": Bug(
        ("trl#5700",),
        "saved tensors that nothing asks for stay in the context's tables; emptied at its end, a later backward raises",
        of_body(unused_branch),
        elsewhere(f"trl, {OFFLOADS}", "it is made for accelerators"),
        more={"no tensor is left behind": leaks_nothing, "backward behind the block": goes_back_outside},
    ),
}


def judged(bug: Bug) -> dict[str, Any]:
    """Who is right about one program."""
    found: dict[str, Any] = {"threads": bug.threads, "reported": bug.reported, "tool": bug.tool()}
    if bug.key is not None:
        right = by_key(bug.make, bug.key)
        found["mechanism"] = {None: "raises", True: "right", False: "other gradients"}[right]
    checks = equal_under_plans(bug.make) | {name: check(bug.make) for name, check in bug.more.items()}
    return found | {"poochplan": checks, "right": all(checks.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = {name: judged(bug) for name, bug in BUGS.items()}
    for name, row in rows.items():
        print(f"{name} ({', '.join(row['threads'])}): {row['tool']['name']}: {row['tool']['said'] or 'right'}")
        wrong = [check for check, holds in row["poochplan"].items() if not holds]
        print(f"  mechanism: {row.get('mechanism', '-')}; poochplan: {wrong or 'right'}")
    write_results(given.output, facts_of_run(given) | {"bugs": rows})
    raise SystemExit(not all(row["right"] for row in rows.values()))


if __name__ == "__main__":
    main()

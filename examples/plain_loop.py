"""Train a small network in 60% of its memory, and see that the gradients are the same bit by bit.

python examples/plain_loop.py
"""

import torch
from torch import nn

import poochplan
from poochplan.runtime.run_report import Report
from poochplan.units import format_bytes


def main() -> tuple[poochplan.Plan, Report, bool]:
    """The plan, what the session measured, and whether the gradients equal those of ordinary training."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(1024, 128), torch.randint(10, (1024,))

    def step() -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    step().backward()  # ordinary training, to compare with
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()

    # 1. Profile: a few real steps. The model and the optimizer are afterwards as they were. What no step touches and
    #    lives beside them is said: it is part of the budget.
    profile = poochplan.profile(step, model=model, optimizer=optimizer, throttle="400MB/s", also=[expected])
    # 2. Plan: keep, swap or recompute each activation.
    plan = poochplan.plan(profile, budget="60%", time_limit_s=5)

    # 3. Run: your loop, inside a session.
    with poochplan.apply(plan, model) as session:
        step().backward()
        optimizer.step()

    equal = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    print(f"in-core peak {format_bytes(profile.in_core_peak_bytes)}, budget {format_bytes(plan.budget_bytes)}")
    print(f"measured peak {format_bytes(session.report().last_step.peak_bytes)}, gradients equal: {equal}")
    return plan, session.report(), equal


if __name__ == "__main__":
    main()

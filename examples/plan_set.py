"""Batches of several lengths: one plan for each length that is frequent, and every step follows the one that fits.

python examples/plan_set.py
"""

from collections.abc import Callable

import torch
from torch import nn

import poochplan


def main() -> list[int]:
    """For each step, the length that the plan it followed was made for."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(64, 64), *blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def step_for(length: int) -> Callable[[], torch.Tensor]:
        tokens = torch.randint(64, (32, length))
        return lambda: loss_of(tokens)

    lengths = (64, 128)
    plans = poochplan.plan_set(
        step_for, lengths, model=model, optimizer=optimizer, budget="75%", throttle="400MB/s", time_limit_s=5
    )

    followed = []
    with poochplan.apply(plans, model) as session:
        for length in (64, 128, 100):  # none was made for 100: that step follows the next larger plan
            loss_of(torch.randint(64, (32, length))).backward()
            followed += [made_for for made_for, plan in zip(lengths, plans.plans, strict=True) if plan is session.plan]
            optimizer.step()
            optimizer.zero_grad()
    print(f"plans followed: {followed}, fallbacks: {session.report().total.fallbacks}")
    return followed


if __name__ == "__main__":
    main()

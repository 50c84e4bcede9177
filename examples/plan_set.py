"""Batches of several lengths: one plan for each length that is frequent, and every step follows the one that fits.

python examples/plan_set.py
"""

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

    plans, link = {}, None
    for length in (64, 128):
        tokens = torch.randint(64, (32, length))

        def step(tokens: torch.Tensor = tokens) -> torch.Tensor:
            return loss_of(tokens)

        profile = poochplan.profile(step, model=model, optimizer=optimizer, throttle="400MB/s", link=link)
        link = profile.link  # measured once
        plans[length] = poochplan.plan(profile, budget="75%", time_limit_s=5)

    followed = []
    with poochplan.apply(poochplan.PlanSet(list(plans.values())), model) as session:
        for length in (64, 128, 100):  # none was made for 100: that step follows the next larger plan
            loss_of(torch.randint(64, (32, length))).backward()
            followed += [made_for for made_for, plan in plans.items() if plan is session.plan]
            optimizer.step()
            optimizer.zero_grad()
    print(f"plans followed: {followed}, fallbacks: {session.report().total.fallbacks}")
    return followed


if __name__ == "__main__":
    main()

"""A training loop as it is, within 60% of its memory: one line is added. python examples/auto_loop.py"""

import torch
from torch import nn

import poochplan


def main(budget: str | int = "60%", *, steps: int = 20, **options: object) -> tuple[list[float], nn.Module, object]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    with poochplan.auto(model, optimizer, budget=budget, **options) as session:
        for number in range(steps):
            if number == 11:
                session.wait_until_planned()  # only so that a loop this short sees its plan
            loss = nn.functional.cross_entropy(model(torch.randn(1024, 64)), torch.randint(10, (1024,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model, session


if __name__ == "__main__":
    main()

"""A workload of your own, for the command line and for Python.

pooch profile examples/own_workload.py:autoencoder --set layers=8 -o profile.json
pooch plan profile.json --budget 70% -o plan.json
pooch run examples/own_workload.py:autoencoder --set layers=8 --plan plan.json --check
"""

import torch
from torch import nn

import poochplan


def autoencoder(batch_size: int = 1024, width: int = 128, layers: int = 6, seed: int = 0) -> poochplan.Workload:
    """An autoencoder on random data. Keyword parameters become ``--set name=value``."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])
    batch = torch.randn(batch_size, width)
    return poochplan.Workload(
        model=model,
        step=lambda: nn.functional.mse_loss(model(batch), batch),  # forward only: poochplan calls backward
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def main() -> dict[str, int]:
    """How many values the plan keeps, swaps and recomputes."""
    workload = autoencoder()
    profile = poochplan.profile(workload.step, model=workload.model, optimizer=workload.optimizer, throttle="400MB/s")
    plan = poochplan.plan(profile, budget="70%", time_limit_s=5)
    decisions = [str(value.decision) for value in plan.values]
    counts = {decision: decisions.count(decision) for decision in ("keep", "swap", "recompute")}
    print(f"{counts}, predicted overhead {plan.prediction.overhead:.1%}")
    return counts


if __name__ == "__main__":
    main()

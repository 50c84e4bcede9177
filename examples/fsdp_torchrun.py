"""FSDP2 within 80% of a step's memory: torchrun --nproc-per-node 2 examples/fsdp_torchrun.py"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import poochplan


def main(budget: str | int = "80%", *, steps: int = 20, **options: object) -> tuple[list[float], nn.Module, object]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*map(fully_shard, blocks), nn.Linear(64, 10))
    optimizer, losses = torch.optim.AdamW(fully_shard(model).parameters()), []
    torch.manual_seed(1 + torch.distributed.get_rank())
    with poochplan.auto(model, optimizer, budget=budget, **options) as session:  # the sharded model, on every rank
        for number in range(steps):
            if number == 11:
                session.wait_until_planned()  # only so that a loop this short sees its plan
            loss = nn.functional.cross_entropy(model(torch.randn(512, 64)), torch.randint(10, (512,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model, session


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main()

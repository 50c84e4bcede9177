"""accelerate with FSDP2 within 80% of its memory: accelerate launch --config_file examples/accelerate_fsdp.yaml FILE"""

import torch
from accelerate import Accelerator
from torch import nn

import poochplan


class Block(nn.Sequential):
    """A unit that accelerate shards: the config file has its name."""


def main(budget: str | int = "80%", *, epochs: int = 3, **options: object) -> tuple[list[float], nn.Module, object]:
    torch.manual_seed(0)
    blocks = [Block(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model, accelerator = nn.Sequential(*blocks, nn.Linear(64, 10)), Accelerator(cpu=not torch.cuda.is_available())
    data = torch.utils.data.TensorDataset(torch.randn(8192, 64), torch.randint(10, (8192,)))
    given = model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, batch_size=512)
    (model, optimizer, loader), losses = accelerator.prepare(*given), []
    with poochplan.auto(model, optimizer, budget=budget, **options) as session:  # the sharded model, on every rank
        for inputs, labels in (batch for _ in range(epochs) for batch in loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model, session


if __name__ == "__main__":
    main()

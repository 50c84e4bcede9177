"""A loop with accelerate, within 60% of its memory; auto takes what was prepared. python examples/accelerate_loop.py"""

import torch
from accelerate import Accelerator
from torch import nn

import poochplan


def main(budget: str | int = "60%", *, epochs: int = 10, **options: object) -> tuple[list[float], nn.Module, object]:
    torch.manual_seed(0)
    accelerator, blocks = Accelerator(cpu=True, gradient_accumulation_steps=2), [nn.Linear(32, 32) for _ in range(8)]
    model = nn.Sequential(*(nn.Sequential(block, nn.GELU()) for block in blocks), nn.Linear(32, 10))
    data = torch.utils.data.TensorDataset(torch.randn(4096, 32), torch.randint(10, (4096,)))
    given = model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, batch_size=1024)
    (model, optimizer, loader), losses = accelerator.prepare(*given), []
    with poochplan.auto(model, optimizer, budget=budget, **options) as session:
        for inputs, labels in (batch for _ in range(epochs) for batch in loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model, session


if __name__ == "__main__":
    main()

"""Lightning's Trainer within 60% of its memory: one callback is added. python examples/lightning_module.py"""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from poochplan.integrations.lightning import PlanCallback


class Classifier(LightningModule):
    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main(*callbacks: Callback, folder: str = "lightning-run", resume: str | None = None) -> Classifier:
    torch.manual_seed(0)
    module, data = Classifier(), torch.utils.data.TensorDataset(torch.randn(4096, 32), torch.randint(10, (4096,)))
    module.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)), nn.Linear(32, 10))
    loader = torch.utils.data.DataLoader(data, batch_size=1024)
    trainer = Trainer(max_steps=20, accelerator="cpu", callbacks=list(callbacks), default_root_dir=folder)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return module


if __name__ == "__main__":
    main(PlanCallback(budget="60%"))

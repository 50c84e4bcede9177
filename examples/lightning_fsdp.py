"""Lightning with FSDP2 within 80% of a step's memory: one callback is added. python examples/lightning_fsdp.py"""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from poochplan.integrations.lightning import PlanCallback


class Classifier(LightningModule):
    def configure_model(self) -> None:
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
        self.net = fully_shard(nn.Sequential(*map(fully_shard, blocks), nn.Linear(64, 10)))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main(*callbacks: Callback, folder: str = "lightning-run") -> Classifier:
    torch.manual_seed(0)
    module, data = Classifier(), torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    shards = {"strategy": ModelParallelStrategy(2, 1), "accelerator": "cpu", "devices": 2}
    trainer = Trainer(max_steps=20, callbacks=list(callbacks), default_root_dir=folder, **shards)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=512))
    return module


if __name__ == "__main__":
    main(PlanCallback(budget="80%"))

"""Image classification: ResNet-50 of Hugging Face transformers, from a configuration, with random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poochplan.runtime.devices.opening import usable_device
from poochplan.workload import Workload

from .common import make_optimizer, require, seeded


def resnet50(
    *,
    batch_size: int = 16,
    image_size: int = 128,
    classes: int = 1000,
    hidden_sizes: Sequence[int] = (256, 512, 1024, 2048),
    depths: Sequence[int] = (3, 4, 6, 3),
    optimizer: str = "sgd",
    lr: float = 0.01,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """ResNet-50 (or another depth or width) with cross entropy, on random square images of ``image_size`` pixels."""
    transformers = require("transformers")
    where, data = usable_device(device), seeded(seed)
    config = transformers.ResNetConfig(hidden_sizes=list(hidden_sizes), depths=list(depths), num_labels=classes)
    model = transformers.ResNetForImageClassification(config).train().to(where)
    images = torch.randn(batch_size, config.num_channels, image_size, image_size, generator=data).to(where)
    labels = torch.randint(classes, (batch_size,), generator=data).to(where)

    def step() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(pixel_values=images).logits, labels)

    return Workload(model, step, make_optimizer(optimizer, model, lr))

"""Segmentation of a real MRI volume by a 3D U-Net of MONAI.

The volume is ``example4d.nii.gz``, two acquisitions of a human brain (128 x 96 x 24 voxels of 2 x 2 x 2.2 mm) that
nibabel ships with its own tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from poochplan.errors import UsageError
from poochplan.runtime.devices.opening import usable_device
from poochplan.workload import Workload

from .common import make_optimizer, require, seeded


def unet3d(
    *,
    batch_size: int = 1,
    side: int = 64,
    features: Sequence[int] = (32, 32, 64, 128, 256, 32),
    classes: int = 4,
    noise: float = 0.1,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """MONAI's ``BasicUNet`` in 3D with batch norm and ``DiceCELoss``, on cubes of ``side`` voxels.

    The network sees the volume with Gaussian noise of standard deviation ``noise`` (the volume's own is 1) and must
    give each voxel its class in the clean volume (:func:`intensity_classes`). A batch alternates between the two
    acquisitions, each with its own noise. ``features`` are the channels of the five levels and of the last layer.

    Raises ``UsageError`` if the libraries or the volume are not installed, or if ``side`` is not a multiple of 16 (four
    levels halve it).
    """
    if side < 32 or side % 16:
        raise UsageError(f"side: expected a multiple of 16 from 32 on, found {side}; use 32, 48, 64, ...")
    if len(features) != 6:
        raise UsageError(f"features: expected 6 channel counts, found {len(features)}; see MONAI's BasicUNet")
    nets, losses = require("monai.networks.nets"), require("monai.losses")
    where, data = usable_device(device), seeded(seed)
    model = nets.BasicUNet(
        spatial_dims=3, in_channels=1, out_channels=classes, features=tuple(features), norm="batch"
    ).train()
    model = model.to(where)
    volumes = brain_volumes(side)
    clean = volumes[torch.arange(batch_size) % len(volumes)]
    target = intensity_classes(clean, classes).to(where)
    images = (standardised(clean) + noise * torch.randn(clean.shape, generator=data)).to(where)
    criterion = losses.DiceCELoss(to_onehot_y=True, softmax=True)

    def step() -> torch.Tensor:
        loss: torch.Tensor = criterion(model(images), target)
        return loss

    return Workload(model, step, make_optimizer(optimizer, model, lr))


def brain_volumes(side: int) -> torch.Tensor:
    """Both acquisitions, cropped to the brain and resampled to cubes: ``[2, 1, side, side, side]``, 0 outside.

    Raises ``UsageError`` if nibabel is not installed, or lacks its test data (some distributions remove it).
    """
    nibabel = require("nibabel")
    path = Path(nibabel.__path__[0]) / "tests" / "data" / "example4d.nii.gz"
    if not path.is_file():
        raise UsageError(
            f"expected the MRI volume {path}, found no such file; install nibabel from its wheel: pip install nibabel"
        )
    voxels = torch.from_numpy(nibabel.load(path).get_fdata(dtype="float32")).permute(3, 0, 1, 2)
    inside = (voxels > 0).any(dim=0).nonzero()  # the scanner's mask: voxels outside the head are exactly 0
    low, high = inside.amin(dim=0).tolist(), (inside.amax(dim=0) + 1).tolist()
    box = voxels[:, low[0] : high[0], low[1] : high[1], low[2] : high[2]].unsqueeze(1)
    return torch.nn.functional.interpolate(box, size=(side, side, side), mode="trilinear", align_corners=False)


def intensity_classes(volumes: torch.Tensor, classes: int) -> torch.Tensor:
    """A class per voxel, from the volume itself: 0 outside the head, then equally populated bands of brightness.

    The bands follow fluid, grey and white matter only roughly; they are not an expert's labels. ``volumes`` is
    ``[n, 1, x, y, z]``. The result is int64 of the same shape, with values 0 to ``classes - 1``.
    """
    if classes < 2:
        raise UsageError(f"classes: expected at least 2 (outside and inside the head), found {classes}")
    head = volumes > 0
    # numpy-free and without torch.quantile's limit on the number of elements
    ordered = volumes[head].sort().values
    cuts = ordered[[len(ordered) * band // (classes - 1) for band in range(1, classes - 1)]]
    return torch.where(head, torch.bucketize(volumes, cuts, right=True) + 1, 0)


def standardised(volumes: torch.Tensor) -> torch.Tensor:
    """The volumes shifted and scaled to mean 0 and standard deviation 1 inside the head."""
    inside = volumes[volumes > 0]
    return (volumes - inside.mean()) / inside.std()

"""Cases with labels for ``benchmarks/full_volume.py``, made from what ships inside packages; nothing is downloaded.

The MNI152 T1 template and its grey and white matter maps (nilearn) are smoothed to the voxel size and sampled onto one
grid. A case is a copy that MONAI's transforms have deformed, together with its maps, and given another contrast, bias
field, ringing and noise, all from one seed. So all cases are of one head: what is learned of it helps on every copy.

The other scanner is ``anatomical.nii`` of nibabel's tests, the middle of a head at 2 mm. Nobody has labelled it: its
labels here are the template's maps at the same coordinates, and follow its anatomy only roughly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from poochplan.workloads.common import require

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]
CLASSES = ("neither", "grey matter", "white matter")
"""A label is an index of these; *neither* is fluid and all outside the brain."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where voxels lie: their number along each axis, their size, and the position of the first one."""

    shape: tuple[int, int, int]
    voxel_mm: float = 3.2
    centre_mm: tuple[float, float, float] = (0.0, -18.0, 8.0)
    """In the template's coordinates; by default that of its brain."""

    @property
    def affine(self) -> npt.NDArray[np.float64]:
        """``[4, 4]``: voxel indices to millimetres."""
        affine = np.diag([self.voxel_mm] * 3 + [1.0])
        affine[:3, 3] = np.array(self.centre_mm) - self.voxel_mm * (np.array(self.shape) - 1) / 2
        return affine


GRID = Grid(shape=(48, 64, 48))
"""The whole brain, 154 x 205 x 154 mm; each side halves four times."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One volume: what the network sees, and what it is to say."""

    name: str
    image: Floats
    """``[x, y, z]``; mean 0 and standard deviation 1 inside the head, 0 outside."""
    labels: Labels
    """``[x, y, z]``, indices of :data:`CLASSES`."""


def template(grid: Grid = GRID) -> Floats:
    """``[3, x, y, z]`` on ``grid``: T1 (0 outside the brain), and how much of each voxel is grey and white matter.

    Raises
    ------
    UsageError
        nilearn is not installed.
    """
    datasets = require("nilearn.datasets", "volume")
    loaders = (datasets.load_mni152_template, datasets.load_mni152_gm_template, datasets.load_mni152_wm_template)
    return np.stack([_sampled(load(resolution=1), grid) for load in loaders])


def _sampled(volume: object, grid: Grid) -> Floats:
    image = require("nilearn.image", "volume")
    smooth = image.smooth_img(volume, fwhm=grid.voxel_mm)
    sampled = image.resample_img(smooth, target_affine=grid.affine, target_shape=grid.shape, interpolation="linear")
    return np.asarray(sampled.get_fdata(), dtype=np.float32)


def labels_of(grey: Floats, white: Floats) -> Labels:
    most: Labels = np.stack([1 - grey - white, grey, white]).argmax(axis=0).astype(np.uint8)
    return most


def standardised(image: Floats, inside: npt.NDArray[np.bool_]) -> Floats:
    """Cut off at the percentiles 0.5 and 99.5; then of mean 0 and standard deviation 1 ``inside``, and 0 outside."""
    low, high = np.percentile(image[inside], [0.5, 99.5])
    cut = image.clip(low, high)
    return np.where(inside, (cut - cut[inside].mean()) / cut[inside].std(), 0).astype(np.float32)


def deformed(of: Floats, seed: int) -> Case:
    """A copy of a :func:`template`, of another shape and as another scan; the same for the same seed.

    Bent (Rand3DElastic), turned by up to 11 degrees, made up to 13% smaller and shifted by up to 2 voxels; then
    another contrast (RandHistogramShift), bias field, Gibbs ringing and noise.
    """
    import torch

    transforms = require("monai.transforms")
    bend = transforms.Rand3DElastic(
        prob=1.0,
        sigma_range=(4, 6),
        magnitude_range=(80, 240),
        rotate_range=(0.2, 0.2, 0.2),
        scale_range=((0.0, 0.15),) * 3,  # of the grid, so that what it shows is smaller,
        translate_range=(2, 2, 2),
        mode="bilinear",
        padding_mode="zeros",
    )
    t1, grey, white = np.asarray(bend.set_random_state(seed)(torch.from_numpy(of)), dtype=np.float32)
    inside = t1 > 0.05
    scan = transforms.Compose(
        [
            transforms.RandHistogramShift(prob=1.0, num_control_points=(5, 8)),
            transforms.RandBiasField(prob=1.0, coeff_range=(0.0, 0.25)),
            transforms.RandGibbsNoise(prob=1.0, alpha=(0.0, 0.5)),
            transforms.RandGaussianNoise(prob=1.0, std=0.06),
        ]
    )
    scanned = np.asarray(scan.set_random_state(seed)(torch.from_numpy(t1[None])), dtype=np.float32)[0]
    return Case(name=f"copy {seed}", image=standardised(scanned, inside), labels=labels_of(grey, white))


def other_scanner(voxel_mm: float = GRID.voxel_mm) -> tuple[Case, float]:
    """The volume of nibabel's tests, resampled, and how its T1 correlates with the template's at the same places.

    Its field of view is 66 x 82 x 50 mm. Its labels are the template's, by coordinates alone.
    """
    nibabel = require("nibabel")
    volume = nibabel.load(Path(nibabel.__path__[0]) / "tests" / "data" / "anatomical.nii")
    extent_mm = np.array(volume.shape) * 2.0
    middle_mm = volume.affine @ np.array([*((np.array(volume.shape) - 1) / 2), 1.0])
    shape = tuple(int(side) for side in extent_mm // voxel_mm)
    grid = Grid(shape=shape, voxel_mm=voxel_mm, centre_mm=tuple(middle_mm[:3]))  # type: ignore[arg-type]
    image = standardised(_sampled(volume, grid), np.ones(shape, dtype=bool))
    t1, grey, white = template(grid)
    alike = float(np.corrcoef(image.ravel(), t1.ravel())[0, 1])
    return Case(name="other scanner", image=image, labels=labels_of(grey, white)), alike

"""The settings of the systems before this one, as data: what each trained, on what, and what it published.

``sources.py`` plans them. Every published figure was measured on a real machine; where a source does not say something
that a simulation has to know (the link, the card's size, the exact network), ``assumed`` says what stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import fit, networks
from benchmarks.instances import Instance, classifier, profile_of
from benchmarks.plans import stored
from poochplan import Profile, Workload
from poochplan.planner import for_machine

MARGIN = "0.5GiB"
"""Of every memory, left to what is no part of the step: as in PoocH's setting."""


class Setting(NamedTuple):
    """One row: a step, the machine it is planned for, and the figure of its source."""

    system: str
    network: str
    published: str
    """Measured by the source on its own machine."""
    device: str = "v100"
    """Of ``profiler/fake/roofline.py``."""
    link: str = "pcie3"
    memory: str = "16GiB"
    build: Callable[..., Workload] | None = None
    """The step by its ``batch_size``; None where ``profile`` gives it."""
    batch: int | None = None
    """As published; None where ``multiple`` says it."""
    multiple: float | None = None
    """Times the largest batch that fits the memory with everything kept."""
    profile: Callable[[], Profile] | None = None
    share: float | None = None
    """Of the in-core peak: the budget where the source names it so."""
    host_budget: int | None = None
    """0 where the source only recomputes."""
    compared: bool = False
    """Whether policies that only swap are asked too, for how long they wait for copies."""
    patience: float = 1.0
    """Times the time limit: for steps whose programs are larger."""
    assumed: str = ""


def vgg16(batch_size: int = 64) -> Workload:
    return classifier(networks.vgg16(), (batch_size, 3, 224, 224), 1000)


def wide_resnet152(batch_size: int = 16) -> Workload:
    return classifier(networks.wide_resnet152(), (batch_size, 3, 224, 224), 1000)


def small(batch_size: int = 16) -> Workload:
    return fit.cifar_resnet(batch_size=batch_size, blocks=2)


def segmentation() -> Workload:
    """Cross entropy over pixels, two classes, SGD with momentum."""
    model, images = networks.unet(), torch.randn(11, 3, 416, 608)
    labels = torch.randint(2, (11, 416, 608))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, lambda: torch.nn.functional.cross_entropy(model(images), labels), optimizer)


def _pooch(link: str, published: str) -> Setting:
    return Setting(
        "PoocH", "ResNet-50", published, link=link, batch=590,
        profile=lambda: for_machine(stored("resnet50-b590-v100"), link=link),
        assumed="batch 590 for the 50 GB that the source names",
    )  # fmt: skip


def _monet(
    key: str, build: Callable[[], Workload], network: str, batch: int, share: float, published: str
) -> dict[str, Setting]:
    """Shah et al., "Memory Optimization for Deep Networks", 2021, table 1: recomputing alone, and with swaps."""

    def profile() -> Profile:
        return for_machine(profile_of(Instance(build, network), network, "v100"), link="pcie3")

    alone = Setting(
        "MONeT", f"{network}, recomputing alone", published, batch=batch, profile=profile, share=share, host_budget=0,
        patience=3.0, assumed="V100 for a P100",
    )  # fmt: skip
    return {key: alone, f"{key}-hybrid": alone._replace(network=network, host_budget=None)}


def _tuned(link: str) -> Setting:
    return Setting(
        "3D U-Net data swapping", "3D U-Net 192^3, base 32", "communication overhead -17.1% by tuning by hand",
        link=link, build=fit.unet3d, batch=2, compared=True, assumed="V100 of 16 GiB, MONAI's network, two volumes",
    )  # fmt: skip


TFLMS_UNET = "192^3 at batch 4, where one 144^3 image fitted"

SETTINGS = {
    "pooch-pcie3": _pooch("pcie3", "+38%"),
    "pooch-nvlink2": _pooch("nvlink2", "+28%"),
    "tflms-resnet50": Setting(
        "TFLMS", "ResNet-50", "4.7 times the in-core batch", "p100", "nvlink1", build=fit.resnet50, multiple=4.7
    ),
    "tflms-unet3d": Setting(
        "TFLMS", "3D U-Net 192^3, base 32", TFLMS_UNET, "p100", "nvlink1", build=fit.unet3d, batch=4,
        assumed="MONAI's network",
    ),
    "tflms-unet3d-half": Setting(
        "TFLMS", "3D U-Net 192^3, base 16", TFLMS_UNET, "p100", "nvlink1", build=fit.unet3d_half, batch=4,
        assumed="MONAI's network, half the channels",
    ),
    "meng-resnet50": Setting(
        "Training Deeper Models", "ResNet-50", "2 to 30 times the in-core batch", "p100", build=fit.resnet50,
        multiple=2.0, assumed="which factor is which network's",
    ),
    "meng-cifar": Setting(
        "Training Deeper Models", "ResNet-164 of 32x32", "2 to 30 times the in-core batch", "p100",
        build=fit.cifar_resnet, multiple=30.0, patience=3.0, assumed="which factor is which network's",
    ),
    "meng-seq2seq": Setting(
        "Training Deeper Models", "Seq2Seq", "2 to 30 times the in-core batch", "p100", build=fit.seq2seq,
        multiple=30.0, assumed="which factor is which network's; 4 + 4 layers of 1,024, 64 tokens of 32,000",
    ),
    "unet3d-tuned-pcie3": _tuned("pcie3"),
    "unet3d-tuned-nvlink2": _tuned("nvlink2"),
    **_monet(
        "monet-resnet50", lambda: classifier(networks.resnet50(), (184, 3, 224, 224), 1000), "ResNet-50", 184,
        4.99 / 15.06, "+11.95%, recomputing alone, 15.06 -> 4.99 GB",
    ),
    **_monet(
        "monet-unet", segmentation, "U-Net 416x608", 11, 5.01 / 14.32,
        "+11.5%, recomputing alone, 14.32 -> 5.01 GB",
    ),
    "vdnn-vgg16": Setting(
        "vDNN", "VGG-16", "28 GB on 12 GB at 18% less speed", "titan-x", memory="12GiB", build=vgg16, batch=256
    ),
    "swapadvisor-resnet50": Setting(
        "SwapAdvisor", "ResNet-50", "12 times the memory at 53 to 99% of ideal", build=fit.resnet50, multiple=12.0,
        patience=3.0, assumed="activations alone grow, by the batch",
    ),
    "swapadvisor-wide": Setting(
        "SwapAdvisor", "wide ResNet-152, 2 times", "12 times the memory at 53 to 99% of ideal", build=wide_resnet152,
        multiple=12.0, assumed="activations alone grow, by the batch; weights stay",
    ),
    "sony-resnet50": Setting(
        "Sony", "ResNet-50", "batch 1440, 7.5 times the in-core one, at 55% of its speed", build=fit.resnet50,
        batch=1440, patience=3.0, assumed="V100 of 16 GiB, by the in-core batch of 192 that 7.5 times means; pcie3",
    ),
}  # fmt: skip
SMALL = {"small": Setting("none", "ResNet-14 of 32x32", "nothing", memory="1GiB", build=small, batch=64, share=0.6)}
"""For the test of the command; not among the settings."""

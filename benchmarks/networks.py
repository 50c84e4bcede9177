"""Networks of the benchmarks that the ready workloads lack: ResNet-50, its wide and 3D relatives, VGG-16, AlexNet,
GoogLeNet, Inception-ResNet-v2, a U-Net.

One definition serves all ResNets: K. He et al., "Deep Residual Learning for Image Recognition", 2015, table 1 (50
layers, with the stride in the 3x3 convolution as torchvision has it), and ResNeXt-101 of K. Hara et al., "Can
Spatiotemporal 3D CNNs Retrace the History of 2D CNNs and ImageNet?", 2018, table 1 (cardinality 32, shortcuts of type
B).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions, each with batch norm, and ReLUs that work in place."""

    def __init__(self, space: Space, width_in: int, middle: int, width_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = space.conv(width_in, middle, 1, bias=False), space.norm(middle)
        self.conv2 = space.conv(middle, middle, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.bn2 = space.norm(middle)
        self.conv3, self.bn3 = space.conv(middle, width_out, 1, bias=False), space.norm(width_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(space.conv(width_in, width_out, 1, stride=stride, bias=False), space.norm(width_out))
            if stride != 1 or width_in != width_out
            else nn.Identity()
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(features)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(features)
        result: torch.Tensor = self.relu(out)
        return result


class Space:
    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.conv = nn.Conv3d if dimensions == 3 else nn.Conv2d
        self.norm = nn.BatchNorm3d if dimensions == 3 else nn.BatchNorm2d
        self.max_pool = nn.MaxPool3d if dimensions == 3 else nn.MaxPool2d
        self.mean = nn.AdaptiveAvgPool3d if dimensions == 3 else nn.AdaptiveAvgPool2d


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, mean and a linear layer."""

    def __init__(
        self, dimensions: int, depths: Sequence[int], middle: int, expansion: int, groups: int, classes: int
    ) -> None:
        super().__init__()
        space = Space(dimensions)
        stem_stride = 2 if dimensions == 2 else (1, 2, 2)  # frames are not thinned out by the stem
        self.conv1 = space.conv(3, 64, 7, stride=stem_stride, padding=3, bias=False)
        self.bn1, self.relu = space.norm(64), nn.ReLU(inplace=True)
        self.maxpool = space.max_pool(3, stride=2, padding=1)
        width, stages = 64, []
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(space, width, middle, middle * expansion, stride, groups))
                width = middle * expansion
            stages.append(nn.Sequential(*blocks))
            middle *= 2
        self.stages = nn.Sequential(*stages)
        self.mean, self.head = space.mean(1), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        logits: torch.Tensor = self.head(torch.flatten(self.mean(self.stages(features)), 1))
        return logits


def resnet50(classes: int = 1000) -> ResNet:
    """ResNet-50, 25.6 million parameters."""
    return ResNet(2, (3, 4, 6, 3), middle=64, expansion=4, groups=1, classes=classes)


def wide_resnet152(wide: int = 2, classes: int = 1000) -> ResNet:
    """ResNet-152 with ``wide`` times the channels in every stage (S. Zagoruyko, N. Komodakis, 2016); 236 million
    parameters at 2.
    """
    return ResNet(2, (3, 8, 36, 3), middle=64 * wide, expansion=4, groups=1, classes=classes)


def vgg16(classes: int = 1000) -> nn.Sequential:
    """VGG-16 of K. Simonyan and A. Zisserman, 2014, table 1, column D, for 224x224 pixels; 138 million parameters."""
    layers: list[nn.Module] = []
    width = 3
    for depth, width_out in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(depth):
            layers += [nn.Conv2d(width, width_out, 3, padding=1), nn.ReLU(inplace=True)]
            width = width_out
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for width_in in (512 * 7 * 7, 4096):
        layers += [nn.Linear(width_in, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


def alexnet(classes: int = 1000) -> nn.Sequential:
    """AlexNet of A. Krizhevsky, 2014, on one device, for 224x224 pixels; 61 million parameters."""
    layers: list[nn.Module] = []
    width = 3
    for width_out, kernel, stride, padding in ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1)):
        layers += [nn.Conv2d(width, width_out, kernel, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if kernel > 3 else []
        width = width_out
    layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2), nn.Flatten()]
    for width_in in (256 * 6 * 6, 4096):
        layers += [nn.Dropout(), nn.Linear(width_in, 4096), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


class Unit(nn.Sequential):
    """A convolution with batch norm and a ReLU in place; padded to keep the sides unless it has a stride."""

    def __init__(
        self, width_in: int, width: int, kernel: int | tuple[int, int], stride: int = 1, padded: bool = True
    ) -> None:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2) if padded else (0, 0)
        convolution = nn.Conv2d(width_in, width, sides, stride, padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def _units(width_in: int, *units: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Units one behind the other: (width, kernel) of each."""
    widths = [width_in, *(width for width, _ in units)]
    return nn.Sequential(*(Unit(widths[at], *unit) for at, unit in enumerate(units)))


class Branches(nn.Module):
    """Branches that read one input; their results are concatenated, or change the input by ``scale`` of them."""

    def __init__(self, *branches: nn.Module, joined: int = 0, width: int = 0, scale: float = 0.0) -> None:
        super().__init__()
        self.branches, self.scale = nn.ModuleList(branches), scale
        self.up = nn.Conv2d(joined, width, 1) if scale else None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        together = torch.cat([branch(features) for branch in self.branches], 1)
        return together if self.up is None else torch.relu(features + self.scale * self.up(together))


def googlenet(classes: int = 1000) -> nn.Sequential:
    """GoogLeNet of C. Szegedy et al., 2014, table 1, with batch norm and one head, for 224x224 pixels."""
    rows = (
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    )  # fmt: skip
    layers: list[nn.Module] = [Unit(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    layers += [Unit(64, 64, 1), Unit(64, 192, 3), nn.MaxPool2d(3, 2, 1)]
    width = 192
    for at, (one, reduced3, three, reduced5, five, pooled) in enumerate(rows):
        if at in (2, 7):
            layers.append(nn.MaxPool2d(3, 2, 1))
        pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), Unit(width, pooled, 1))
        of_three, of_five = _units(width, (reduced3, 1), (three, 3)), _units(width, (reduced5, 1), (five, 5))
        layers.append(Branches(Unit(width, one, 1), of_three, of_five, pool))
        width = one + three + five + pooled
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(width, classes))


def inception_resnet(classes: int = 1000) -> nn.Sequential:
    """Inception-ResNet-v2 of C. Szegedy et al., 2016, figures 15 to 20, for 299x299 pixels; 56 million parameters."""

    def smaller(width_in: int, *units: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
        *first, (width, kernel) = units
        before = first[-1][0] if first else width_in
        return nn.Sequential(*_units(width_in, *first), Unit(before, width, kernel, 2, padded=False))

    stem = [Unit(3, 32, 3, 2, padded=False), Unit(32, 32, 3, padded=False), Unit(32, 64, 3), nn.MaxPool2d(3, 2)]
    stem += [Unit(64, 80, 1), Unit(80, 192, 3, padded=False), nn.MaxPool2d(3, 2)]
    pool = nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), Unit(192, 64, 1))
    a = Branches(Unit(192, 96, 1), _units(192, (48, 1), (64, 5)), _units(192, (64, 1), (96, 3), (96, 3)), pool)
    of_a = ((32, 1),), ((32, 1), (32, 3)), ((32, 1), (48, 3), (64, 3))
    to_b = Branches(smaller(320, (384, 3)), smaller(320, (256, 1), (256, 3), (384, 3)), nn.MaxPool2d(3, 2))
    of_b = ((192, 1),), ((128, 1), (160, (1, 7)), (192, (7, 1)))
    to_c = Branches(
        smaller(1088, (256, 1), (384, 3)), smaller(1088, (256, 1), (288, 3)),
        smaller(1088, (256, 1), (288, 3), (320, 3)), nn.MaxPool2d(3, 2),
    )  # fmt: skip
    of_c = ((192, 1),), ((192, 1), (224, (1, 3)), (256, (3, 1)))

    def blocks(count: int, width: int, scale: float, *rows: Sequence[tuple[int, int | tuple[int, int]]]) -> nn.Module:
        joined = sum(row[-1][0] for row in rows)
        made = (
            Branches(*(_units(width, *row) for row in rows), joined=joined, width=width, scale=scale)
            for _ in range(count)
        )
        return nn.Sequential(*made)

    body = [a, blocks(10, 320, 0.17, *of_a), to_b, blocks(20, 1088, 0.1, *of_b), to_c, blocks(10, 2080, 0.2, *of_c)]
    head = [Unit(2080, 1536, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1536, classes)]
    return nn.Sequential(*stem, *body, *head)


def resnext101_3d(classes: int = 400) -> ResNet:
    """ResNeXt-101 in 3D for clips of 16 frames of 112x112 pixels, 48 million parameters."""
    return ResNet(3, (3, 4, 23, 3), middle=128, expansion=2, groups=32, classes=classes)


class Twice(nn.Sequential):
    """Two 3x3 convolutions, each with batch norm and a ReLU in place."""

    def __init__(self, width_in: int, width_out: int) -> None:
        layers: list[nn.Module] = []
        for width in (width_in, width_out):
            layers += [nn.Conv2d(width, width_out, 3, padding=1), nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Four levels down by max pooling, and up again by bilinear interpolation with what was on each level before."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 512)
        self.stem = Twice(3, widths[0])
        self.down = nn.ModuleList(Twice(one, other) for one, other in itertools.pairwise(widths))
        ups = [(1024, 256), (512, 128), (256, 64), (128, 64)]
        self.up = nn.ModuleList(Twice(one, other) for one, other in ups)
        self.head = nn.Conv2d(64, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        levels = [self.stem(images)]
        for block in self.down:
            levels.append(block(nn.functional.max_pool2d(levels[-1], 2)))
        features = levels.pop()
        for block in self.up:
            skip = levels.pop()
            larger = nn.functional.interpolate(features, skip.shape[2:], mode="bilinear", align_corners=True)
            features = block(torch.cat([skip, larger], 1))
        logits: torch.Tensor = self.head(features)
        return logits


def unet(classes: int = 2) -> UNet:
    """The U-Net of O. Ronneberger et al., 2015, with batch norm and bilinear upsampling, 17 million parameters."""
    return UNet(classes)

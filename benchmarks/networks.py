"""Networks of the benchmarks that the ready workloads lack: ResNet-50, its wide and 3D relatives, VGG-16, a U-Net.

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
    """The layers of two or three dimensions."""

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

"""Networks of the tests, and the ONNX files that torch's two exporters make of them."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


class Block(nn.Module):
    """Embedding, positions, one transformer block, a head for each position."""

    def __init__(self, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(7, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.block(self.embed(tokens) + self.places(places)))


class Recurrent(nn.Module):
    """Embedding, an LSTM in both directions, a head for each position."""

    def __init__(self, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, 24, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def images_network() -> nn.Module:
    """Convolutions with and without bias, batch normalisation, pooling, a head."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


def tied_network() -> nn.Module:
    """A table that is the head's weight too, and two norms that begin equal."""
    table, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, nn.LayerNorm(16), nn.LayerNorm(16), head)


NETWORKS: dict[str, Callable[[], nn.Module]] = {"cnn": images_network, "block": Block, "lstm": Recurrent}
EXPORTERS = ("dynamo", "dynamo optimised", "script", "script folded")


@dataclass(frozen=True)
class Exported:
    """A file, the network that it was made of, in eval mode, and a batch of another size than it was exported with."""

    path: Path
    network: nn.Module
    batch: torch.Tensor


def export(name: str, exporter: str, folder: Path) -> Exported:
    """Writes the network ``name`` as it begins, its batch dynamic: norms of one size are equal, as some biases are."""
    torch.manual_seed(1)
    network = (tied_network if name == "tied" else NETWORKS[name])().eval()
    example, batch = (
        torch.randn(size, 3, 16, 16) if name == "cnn" else torch.randint(0, 50, (size, 7)) for size in (2, 5)
    )
    path = folder / f"{name}_{exporter.replace(' ', '_')}.onnx"
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        _write(network, example, path, exporter)
    return Exported(path, network, batch)


def _write(network: nn.Module, example: torch.Tensor, path: Path, exporter: str) -> None:
    if exporter.startswith("dynamo"):
        shapes = ({0: torch.export.Dim("batch")},)
        optimised = exporter.endswith("optimised")
        torch.onnx.export(
            network, (example,), path, input_names=["given"], dynamo=True, dynamic_shapes=shapes, optimize=optimised
        )
        return
    folded = exporter.endswith("folded")
    mode = torch.onnx.TrainingMode.EVAL if folded else torch.onnx.TrainingMode.PRESERVE
    torch.onnx.export(
        *(network, (example,), path),
        input_names=["given"],
        dynamo=False,
        opset_version=17,
        dynamic_axes={"given": {0: "batch"}},
        do_constant_folding=folded,
        training=mode,
    )

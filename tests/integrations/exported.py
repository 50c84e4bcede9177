"""Networks of the tests, the ONNX files that torch's two exporters make of them, and steps of what is imported."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import poochplan
from tests.runtime.nets import Case, followed


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
        shapes, optimised = ({0: torch.export.Dim("batch")},), exporter.endswith("optimised")
        options = {"dynamo": True, "dynamic_shapes": shapes, "optimize": optimised}
    else:
        folded, modes = exporter.endswith("folded"), torch.onnx.TrainingMode
        options = {"dynamo": False, "opset_version": 17, "dynamic_axes": {"given": {0: "batch"}}}
        options |= {"do_constant_folding": folded, "training": modes.EVAL if folded else modes.PRESERVE}
    torch.onnx.export(network, (example,), path, input_names=["given"], **options)


def assert_planned_is_in_core(model: torch.nn.Module, batch: torch.Tensor, spill_dir: Path) -> None:
    """Gradients and what the step leaves in the model are the same to the bit."""
    case = Case(lambda: (copy.deepcopy(model).train(), lambda its: its(batch).square().mean()))
    profile = case.new_profile(warmup=1, spill_dir=spill_dir)
    for policy in ("swap-all-on-demand", "recompute-all"):
        plan = poochplan.plan(profile, 1 << 30, policy=policy, arena="off")
        report = followed(case, plan, steps=1, spill_dir=spill_dir)
        step = report.last_step
        assert step.out_bytes if policy == "swap-all-on-demand" else step.replayed_values
        assert report.steps_followed == 1


def gradients(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one step; each parameter has one."""
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    return loss.detach(), [weight.grad.clone() for weight in model.parameters()]

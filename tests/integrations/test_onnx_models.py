"""A network that comes back from an ONNX file is the one that went in: weights, losses, gradients, and under a plan."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

from poochplan.integrations.onnx import load

from .exported import EXPORTERS, NETWORKS, Exported, assert_planned_is_in_core, export, gradients

Files = Callable[[str, str], Exported]

EXACT = ("dynamo", "script")
"""Exporters that leave weights as they were; the others fold batch normalisation and transpose."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("exported")
    return functools.cache(lambda name, exporter: export(name, exporter, folder))


def shapes(model: torch.nn.Module) -> Counter[tuple[int, ...]]:
    return Counter(tuple(weight.shape) for weight in model.parameters())


def test_parameters_that_the_older_exporter_joined_are_parted_and_named(files: Files) -> None:
    file = files("block", "script")
    held = {tensor.name for tensor in onnx.load(file.path).graph.initializer}
    joined = sorted(dict(file.network.named_parameters()).keys() - held)
    assert joined == ["block.norm1.bias", "block.norm2.bias", "block.norm2.weight"]
    with pytest.warns(UserWarning, match=rf"3 parameters were joined with equal ones \({', '.join(joined)}\)"):
        model = load(file.path)
    places = {weight.data_ptr() for weight in model.parameters()}
    assert len(places) == len(list(file.network.parameters()))


def test_parameters_that_cannot_be_parted_are_told(files: Files) -> None:
    with pytest.warns(UserWarning, match=r"several layers have one parameter \(block.norm1.bias, block.norm1.weight\)"):
        load(files("block", "dynamo optimised").path)


@pytest.mark.parametrize("exporter", EXACT)
def test_a_parameter_that_the_module_shares_stays_one(exporter: str, tmp_path: Path) -> None:
    file = export("tied", exporter, tmp_path)
    model = load(file.path)
    assert shapes(model) == shapes(file.network) == Counter([(50, 16), (16,), (16,), (16,), (16,)])
    table = next(weight for weight in model.parameters() if weight.ndim == 2)
    gradients(model, file.batch), gradients(file.network, file.batch)
    torch.testing.assert_close(table.grad, file.network[0].weight.grad, rtol=1e-5, atol=1e-5)


def running(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model.named_buffers() if "running" in key}


@pytest.mark.parametrize("exporter", EXACT)
def test_statistics_are_buffers_that_are_trained_by_the_batch_in_training_mode(files: Files, exporter: str) -> None:
    file = files("cnn", exporter)
    imported, original = load(file.path).train(), copy.deepcopy(file.network).train()
    torch.testing.assert_close(running(imported), running(original), rtol=0, atol=0)
    torch.testing.assert_close(gradients(imported, file.batch)[0], gradients(original, file.batch)[0])
    torch.testing.assert_close(running(imported), running(original), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_loss_and_of_an_exact_exporter_each_gradient_and_its_shape_are_those_of_the_module(
    files: Files, name: str, exporter: str
) -> None:
    file = files(name, exporter)
    found, given = gradients(load(file.path), file.batch)
    wanted, gradients_wanted = gradients(file.network, file.batch)
    assert abs(found - wanted) <= 1e-5 * max(1.0, float(wanted))
    if exporter not in EXACT:
        return
    left = dict(enumerate(given))
    for one in gradients_wanted:
        same = [key for key, found in left.items() if found.shape == one.shape]
        near = min(same, key=lambda key: float((left[key] - one).abs().max()))
        torch.testing.assert_close(left.pop(near), one, rtol=1e-5, atol=1e-5)
    assert not left


def test_an_unoptimised_export_has_the_names_of_the_module(files: Files) -> None:
    file = files("cnn", "dynamo")
    imported = load(file.path)
    assert set(dict(imported.named_parameters())) == set(dict(file.network.named_parameters()))
    assert imported.load_state_dict(file.network.state_dict(), strict=False).missing_keys == []


@pytest.mark.parametrize("name", NETWORKS)
def test_a_planned_step_is_bitwise_the_one_in_core(files: Files, name: str, on_disk: Path) -> None:
    file = files(name, "dynamo")
    assert_planned_is_in_core(load(file.path), file.batch.repeat(8, *[1] * (file.batch.ndim - 1)), on_disk)

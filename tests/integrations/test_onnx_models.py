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

from .exported import EXPORTERS, NETWORKS, Exported, export
from .planned import assert_planned_is_in_core, gradients

Files = Callable[[str, str], Exported]

EXACT = ("dynamo", "script")
"""Exporters that leave weights as they were; the others fold batch normalisation and transpose."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("exported")
    return functools.cache(lambda name, exporter: export(name, exporter, folder))


def shapes(model: torch.nn.Module) -> Counter[tuple[int, ...]]:
    return Counter(tuple(weight.shape) for weight in model.parameters())


@pytest.mark.parametrize("exporter", EXACT)
@pytest.mark.parametrize("name", NETWORKS)
def test_number_and_shapes_of_parameters_are_those_of_the_module(files: Files, name: str, exporter: str) -> None:
    file = files(name, exporter)
    assert shapes(load(file.path)) == shapes(file.network)


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


@pytest.mark.parametrize("exporter", EXACT)
def test_running_statistics_are_buffers(files: Files, exporter: str) -> None:
    file = files("cnn", exporter)
    wanted = {key: value for key, value in file.network.named_buffers() if "running" in key}
    found = {key: value for key, value in load(file.path).named_buffers() if "running" in key}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_loss_is_that_of_the_module(files: Files, name: str, exporter: str) -> None:
    file = files(name, exporter)
    found, _ = gradients(load(file.path), file.batch)
    wanted, _ = gradients(file.network, file.batch)
    assert abs(found - wanted) <= 1e-5 * max(1.0, float(wanted))


@pytest.mark.parametrize("exporter", EXACT)
def test_statistics_equal_to_weights_are_trained_by_the_batch(files: Files, exporter: str) -> None:
    file = files("cnn", exporter)
    imported, original = load(file.path).train(), copy.deepcopy(file.network).train()
    torch.testing.assert_close(gradients(imported, file.batch)[0], gradients(original, file.batch)[0])
    for key, wanted in original.named_buffers():
        if "running" in key:
            torch.testing.assert_close(imported.get_buffer(key), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exporter", EXACT)
@pytest.mark.parametrize("name", NETWORKS)
def test_each_gradient_is_that_of_the_module(files: Files, name: str, exporter: str) -> None:
    file = files(name, exporter)
    left = dict(enumerate(gradients(load(file.path), file.batch)[1]))
    for wanted in gradients(file.network, file.batch)[1]:
        same = [key for key, found in left.items() if found.shape == wanted.shape]
        near = min(same, key=lambda key: float((left[key] - wanted).abs().max()))
        torch.testing.assert_close(left.pop(near), wanted, rtol=1e-5, atol=1e-5)
    assert not left


def test_an_unoptimised_export_has_the_names_of_the_module(files: Files) -> None:
    file = files("cnn", "dynamo")
    imported = load(file.path)
    assert set(dict(imported.named_parameters())) == set(dict(file.network.named_parameters()))
    assert imported.load_state_dict(file.network.state_dict(), strict=False).missing_keys == []


def test_in_training_mode_batch_normalisation_goes_by_the_batch(files: Files) -> None:
    file = files("cnn", "dynamo")
    imported, original = load(file.path).train(), copy.deepcopy(file.network).train()
    torch.testing.assert_close(imported(file.batch), original(file.batch), rtol=1e-5, atol=1e-5)
    moved, wanted = imported.get_buffer("1.running_mean"), original.get_buffer("1.running_mean")
    torch.testing.assert_close(moved, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(moved, load(file.path).get_buffer("1.running_mean"))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_planned_step_is_bitwise_the_one_in_core(files: Files, name: str, tmp_path: Path) -> None:
    file = files(name, "dynamo")
    assert_planned_is_in_core(load(file.path), file.batch.repeat(8, *[1] * (file.batch.ndim - 1)), tmp_path)

"""Files that are not of torch: of skl2onnx, and written by hand in onnxscript."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import skl2onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxscript import FLOAT, opset20, script
from onnxscript.values import Opset
from sklearn import neural_network

from poochplan.errors import UsageError
from poochplan.integrations.onnx import load

from .exported import assert_planned_is_in_core, gradients

RANDOM = np.random.default_rng(3)
LOCAL = Opset("local", 1)
SHARED, SCALE = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((8, 8), (8,)))


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


# -- skl2onnx ------------------------------------------------------------------------------------------------------


def perceptron(kind: str, folder: Path, **asked: Any) -> tuple[Any, Path, np.ndarray]:
    """A fitted perceptron of scikit-learn, its file, and the data that it was fitted to."""
    data = floats(64, 8)
    wanted = data @ floats(8, 2) if kind == "MLPRegressor" else data.argmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has not converged
        fresh = getattr(neural_network, kind)(hidden_layer_sizes=(16, 12), max_iter=3, random_state=1)
        fitted = fresh.fit(data, wanted)
    path = folder / f"{kind}.onnx"
    options = {id(fitted): {"zipmap": False}} if kind == "MLPClassifier" else None
    onnx.save(skl2onnx.to_onnx(fitted, data[:1], options=options, **asked), path)
    return fitted, path, data


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_a_perceptron_of_scikit_learn_has_its_weights_and_gives_what_it_predicts(opset: int, tmp_path: Path) -> None:
    fitted, path, data = perceptron("MLPRegressor", tmp_path, target_opset=opset)
    model = load(path)
    kept = [weight.detach().numpy().squeeze() for weight in model.parameters()]
    pairs = zip(fitted.coefs_, fitted.intercepts_, strict=True)
    wanted = [array.astype(np.float32) for pair in pairs for array in pair]
    assert all(map(np.array_equal, kept, wanted))
    found = model(torch.tensor(data)).detach().numpy().reshape(64, 2)
    np.testing.assert_allclose(found, fitted.predict(data), rtol=1e-4, atol=1e-5)


def test_the_labels_of_a_classifier_are_refused_by_node_and_its_probabilities_are_not(tmp_path: Path) -> None:
    fitted, path, data = perceptron("MLPClassifier", tmp_path)
    with pytest.raises(UsageError, match=r"node 'ArrayFeatureExtractor' .* of ai\.onnx\.ml is not known"):
        load(path)
    onnx.utils.extract_model(path, tmp_path / "probabilities.onnx", ["X"], ["probabilities"])
    found = load(tmp_path / "probabilities.onnx")(torch.tensor(data)).detach().numpy()
    np.testing.assert_allclose(found, fitted.predict_proba(data), rtol=1e-4, atol=1e-5)


# -- onnxscript ----------------------------------------------------------------------------------------------------


@script(LOCAL, default_opset=opset20)
def normed(value, scale):  # type: ignore[no-untyped-def]
    axis = opset20.Constant(value_ints=[-1])
    apart = opset20.Sub(value, opset20.ReduceMean(value, axis))
    variance = opset20.ReduceMean(opset20.Mul(apart, apart), axis)
    return opset20.Mul(opset20.Div(apart, opset20.Sqrt(opset20.Add(variance, 1e-5))), scale)


@script(default_opset=opset20)
def tied(value: FLOAT["batch", 8], shared: FLOAT[8, 8], scale: FLOAT[8]) -> FLOAT["batch", 8]:  # noqa: F821, UP037
    first = normed(opset20.Relu(opset20.MatMul(value, shared)), scale)
    second = normed(opset20.Relu(opset20.MatMul(first, shared)), scale)
    return opset20.MatMul(second, opset20.Transpose(shared, perm=[1, 0]))


def by_hand(path: Path, **external: Any) -> Path:
    """Two layers of one weight, which the head transposes, and a norm as a local function, of one scale."""
    model = tied.to_model_proto()
    held = [numpy_helper.from_array(array, name) for name, array in (("shared", SHARED), ("scale", SCALE))]
    model.graph.initializer.extend(held)
    onnx.save(model, path, **external)
    return path


def test_a_model_by_hand_shares_its_initialisers_and_gives_what_the_reference_gives(tmp_path: Path) -> None:
    path, data = by_hand(tmp_path / "tied.onnx"), floats(5, 8)
    model = load(path)
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == {"shared": (8, 8), "scale": (8,)}
    (wanted,) = ReferenceEvaluator(str(path)).run(None, {"value": data})
    np.testing.assert_allclose(model(torch.tensor(data)).detach().numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_shared_initialiser_is_the_sum_over_its_layers(tmp_path: Path) -> None:
    weight, scale = (torch.tensor(array, requires_grad=True) for array in (SHARED, SCALE))
    data = torch.tensor(floats(5, 8))

    def layer(value: torch.Tensor) -> torch.Tensor:
        apart = (value @ weight).relu()
        apart = apart - apart.mean(-1, keepdim=True)
        return apart / (apart.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale

    (layer(layer(data)) @ weight.T).square().mean().backward()
    model = load(by_hand(tmp_path / "tied.onnx"))
    gradients(model, data)
    for name, wanted in (("shared", weight), ("scale", scale)):
        torch.testing.assert_close(model.get_parameter(name).grad, wanted.grad, rtol=1e-4, atol=1e-5)


def test_a_planned_step_of_a_model_with_external_data_is_bitwise_the_one_in_core(tmp_path: Path, on_disk: Path) -> None:
    kept = {"save_as_external_data": True, "all_tensors_to_one_file": False, "size_threshold": 0}
    path = by_hand(tmp_path / "tied.onnx", **kept)
    assert (tmp_path / "shared").is_file()
    assert_planned_is_in_core(load(path), torch.tensor(floats(64, 8)), on_disk)

"""``pooch profile model.onnx``: what it trains, and what it says of a file that it cannot take, in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from poochplan.cli import main
from poochplan.errors import UsageError
from poochplan.formats.profile import Profile
from poochplan.integrations.onnx import load
from poochplan.integrations.onnx.onnx_file import _without_weights, known_shapes
from poochplan.workload import load_workload, parameter_values

WEIGHTS = {"table": (9, 4), "product": (4, 3), "bias": (1,)}


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto] | None = None,
    *,
    opset: int = 18,
    arrays: dict[str, np.ndarray] | None = None,
) -> Path:
    """A model of token indices ``ids`` (batch, length); by default a table, a product and a bias of one number."""
    usual = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="look_up"),
        helper.make_node("MatMul", ["rows", "product"], ["raw"], name="multiply"),
        helper.make_node("Add", ["raw", "bias"], ["out"], name="add"),
    ]
    held = {name: np.full(shape, 0.5, np.float32) for name, shape in WEIGHTS.items()} | (arrays or {})
    graph = helper.make_graph(
        list(nodes or usual),
        "small",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "time steps"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, path)
    return path


def node(kind: str, **attributes: Any) -> list[onnx.NodeProto]:
    return [helper.make_node(kind, ["table", "product"], ["out"], name="the node", **attributes)]


def test_a_bias_of_two_layers_is_told_for_an_exporter_may_have_joined_equal_ones(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "square"], ["first"]),
        helper.make_node("Add", ["zeros", "first"], ["between"]),
        helper.make_node("MatMul", ["between", "other"], ["second"]),
        helper.make_node("Add", ["second", "zeros"], ["out"]),
    ]
    squares = {name: np.full((4, 4), value, np.float32) for name, value in (("square", 0.5), ("other", 0.25))}
    path = write(tmp_path / "model.onnx", nodes, arrays=squares | {"zeros": np.zeros(4, np.float32)})
    with pytest.warns(UserWarning, match=r"several layers have one parameter \(zeros\)"):
        load(path)


def test_dynamic_dimensions_are_parameters_of_the_workload(tmp_path: Path) -> None:
    name, values = parameter_values(str(write(tmp_path / "model.onnx")))
    assert name == "model"
    assert list(values)[:3] == ["batch", "time_steps", "loss"]


def test_indices_are_drawn_within_the_table_and_the_same_for_one_seed(tmp_path: Path) -> None:
    path, losses = write(tmp_path / "model.onnx", arrays={"table": np.eye(9, 4, dtype=np.float32)}), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        workload = load_workload(str(path), {"loss": "mse", "batch": "7", "time_steps": "5"}).workload
        losses.append(workload.step().detach())
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])
    assert workload.model.training


@pytest.mark.parametrize("loss", ["mse", "cross-entropy", "file.py"])
def test_each_loss_trains_every_weight(loss: str, tmp_path: Path) -> None:
    if loss == "file.py":
        (tmp_path / "losses.py").write_text("def largest(found):\n    return found.max(2).values.sum()\n")
        loss = f"{tmp_path / 'losses.py'}:largest"
    workload = load_workload(
        str(write(tmp_path / "model.onnx")), {"loss": loss, "batch": "4", "time_steps": "5"}
    ).workload
    workload.step().backward()
    found = {name: tuple(weight.shape) for name, weight in workload.model.named_parameters() if weight.grad is not None}
    assert found == WEIGHTS


def test_masks_numbers_and_what_is_named_are_no_weights(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Mul", ["rows", "factor"], ["scaled"]),
        helper.make_node("Add", ["scaled", "mask"], ["masked"]),
        helper.make_node("Add", ["masked", "places"], ["out"]),
    ]
    arrays = {
        "factor": np.full(1, 2.0, np.float32),
        "mask": np.array([0, 0, 0, -np.inf], np.float32),
        "places": np.ones(4, np.float32),
    }
    path = write(tmp_path / "model.onnx", nodes, arrays=arrays)
    assert [name for name, _ in load(path).named_parameters()] == ["table", "places"]
    assert [name for name, _ in load(path, constants=["places"]).named_parameters()] == ["table"]
    assert "factor" in dict(load(path, parameters=["factor"]).named_parameters())


def test_names_that_no_code_could_have_are_changed(tmp_path: Path) -> None:
    awkward = ["in.weight", "1", "a\n b", "x.weight", "self.x.weight", "", ".", "class", "1); raise(0"]
    arrays = {name: np.full(4, 1.5, np.float32) for name in awkward if name}
    nodes = [helper.make_node("Gather", ["table", "ids"], ["sum_0"], name="lambda")]
    for place, name in enumerate(arrays):
        nodes.append(helper.make_node("Add", [f"sum_{place}", name], [f"sum_{place + 1}"], name=name))
    nodes.append(helper.make_node("Identity", [f"sum_{len(arrays)}"], ["out"]))
    path = write(tmp_path / "1 class.onnx", nodes, arrays=arrays)
    model = onnx.load(path)
    model.graph.input[0].name = model.graph.node[0].input[1] = "2); raise(1"
    onnx.save(model, path)
    found = load(path)
    assert len(list(found.parameters())) == 1 + len(arrays)
    assert torch.equal(found(torch.zeros(2, 3, dtype=torch.int64)), torch.full((2, 3, 4), 0.5 + 1.5 * len(arrays)))


def test_shapes_of_a_dynamic_batch_are_computed_beside_the_tensors(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Shape", ["rows"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["batch_size"]),
        helper.make_node("Concat", ["batch_size", "rest"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["rows", "wanted"], ["out"]),
    ]
    arrays = {"first": np.array([0]), "rest": np.array([-1])}
    model = load(write(tmp_path / "model.onnx", nodes, arrays=arrays))
    assert [tuple(model(torch.zeros(size, 5, dtype=torch.int64)).shape) for size in (2, 3)] == [(2, 20), (3, 20)]
    assert len([made for made in model.graph.nodes if made.op == "call_module"]) == len(nodes)


dropped = [helper.make_node("Dropout", ["table", "ratio", "on"], ["out"], name="it")]
timed = [helper.make_node("RNN", ["table", "product", "product", "", "lengths"], ["out"], name="it", hidden_size=4)]
REFUSED = [
    ({"nodes": node("NonZero")}, ["'the node' (NonZero)", "not known"]),
    ({"nodes": node("Attention", domain="com.microsoft")}, ["'the node' (Attention)", "com.microsoft"]),
    ({"nodes": node("BatchNormalization", training_mode=1)}, ["'the node'", "training mode", "model.eval()"]),
    ({"nodes": node("GRU", hidden_size=4)}, ["'the node' (GRU)", "linear_before_reset=1"]),
    ({"nodes": node("MaxPool", kernel_shape=[2], storage_order=1)}, ["storage_order: expected 0, found 1"]),
    ({"nodes": dropped, "arrays": {"ratio": np.array(0.5, np.float32), "on": np.array(True)}}, ["'it' (Dropout)"]),
    ({"nodes": timed, "arrays": {"lengths": np.array([3], np.int32)}}, ["'it' (RNN)", "sequence_lens"]),
    ({"opset": 12}, ["expected opset 13 to 28, found 12"]),
]


def matmul(*inputs: str, name: str = "the node", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("MatMul", inputs, ["out"], name=name, **attributes)


late = [
    helper.make_node("Relu", ["rows"], ["out"], name="the node"),
    helper.make_node("Gather", ["table", "ids"], ["rows"]),
]
twice = [
    helper.make_node("Relu", ["table"], ["out"], name="one"),
    helper.make_node("Relu", ["table"], ["out"], name="two"),
]
whole = {"whole": np.ones(4, np.int64)}
INVALID = [
    ([matmul("table")], {}, ["checker", "the node", "MatMul", "input size 1"]),
    ([matmul("table", name="")], {}, ["checker", "Name: out OpType: MatMul"]),
    ([matmul("table", "product", alpha=1.0)], {}, ["checker", "Unrecognized attribute: alpha", "the node"]),
    (late, {}, ["checker", "topologically sorted", "the node"]),
    (twice, {}, ["checker", "single static assignment", "'out'"]),
    ([matmul("product", "product")], {}, ["types and shapes", "the node", "Incompatible dimensions"]),
    ([matmul("product", "product", name="")], {}, ["types and shapes", "node name: out"]),
    ([helper.make_node("Add", ["table", "whole"], ["out"], name="it")], whole, ["types and shapes", "node name: it"]),
    (
        [helper.make_node("Shape", ["table"], ["out"], name="it")],
        {},
        ["types and shapes", "node name: it", "elem type"],
    ),
]


"""What the checker and inference refuse, by node."""


@pytest.mark.parametrize(
    ("made", "says"), [*REFUSED, *(({"nodes": nodes, "arrays": arrays}, says) for nodes, arrays, says in INVALID)]
)
def test_what_is_not_known_or_not_valid_is_refused_by_name(
    made: dict[str, Any], says: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "model.onnx", **made)
    with pytest.raises(UsageError) as raised:
        load(path)
    line = str(raised.value)
    assert line.startswith(f"{path}: ")
    assert all(part in line for part in says), line
    assert "\n" not in line


def test_inference_is_not_given_large_weights(tmp_path: Path) -> None:
    """It takes a model as bytes, of which there may be 2 GiB at most; shapes are known all the same."""
    path = write(tmp_path / "model.onnx", arrays={"table": np.zeros((4096, 4), np.float32)})
    assert _without_weights(onnx.load(path)).ByteSize() < 4096
    assert known_shapes(path, onnx.load(path))["table"] == (4096, 4)


def test_external_data_of_initialisers_and_constants_is_read_and_missed(tmp_path: Path) -> None:
    held = numpy_helper.from_array(np.full(4, 0.5, np.float32))
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Constant", [], ["half"], value=held),
        helper.make_node("Add", ["rows", "half"], ["out"]),
    ]
    path = write(tmp_path / "model.onnx", nodes)
    beside: dict[str, Any] = {"save_as_external_data": True, "location": "beside.data", "size_threshold": 0}
    onnx.save(onnx.load(path), path, convert_attribute=True, **beside)
    assert torch.equal(load(path)(torch.zeros(1, 1, dtype=torch.int64)), torch.ones(1, 1, 4))
    (tmp_path / "beside.data").write_bytes(b"")
    with pytest.raises(UsageError, match="its external data cannot be read"):
        load(path)
    (tmp_path / "beside.data").unlink()
    with pytest.raises(UsageError, match=r"expected in .*beside\.data, found no such file"):
        load(path)


def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("a text, and no model")
    with pytest.raises(UsageError, match="expected an ONNX model"):
        load(path)


GIVEN = ["--set", "batch=2", "--set", "time_steps=3"]
ASKED = [
    (["--loss", "mse", "--set", "btch=2"], ["unknown parameter 'btch'", "did you mean batch", "time_steps"]),
    (["--loss", "mse", "--set", "batch=2"], ["missing parameter 'time_steps'", "--set time_steps="]),
    (["--loss", "mse", "--set", "batch=0", "--set", "time_steps=3"], ["'batch'", "at least 1, found 0"]),
    (GIVEN, ["expected a loss", "--loss mse"]),
    (["--loss", "huber", *GIVEN], ["'huber'", "mse, cross-entropy or file.py:function"]),
]


@pytest.mark.parametrize(("asked", "says"), ASKED)
def test_the_command_line_says_what_is_wrong_in_one_line(
    asked: list[str], says: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(write(tmp_path / "model.onnx")), *asked]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(part in lines[0] for part in says)


def test_the_command_line_profiles_a_file(tmp_path: Path) -> None:
    path, out = write(tmp_path / "model.onnx"), tmp_path / "it.json"
    arguments = ["profile", str(path), "--loss", "mse", *GIVEN, "-o", str(out), "--mode", "fake", "--roofline", "v100"]
    assert main(arguments) == 0
    found = Profile.load(out)
    assert found.workload == "model"
    assert {"look_up", "multiply", "add"} <= {op.layer for op in found.ops}


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx")
    hidden = "import sys; sys.modules['onnx'] = None; from poochplan.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", hidden, "profile", str(path), "--loss", "mse", *GIVEN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "pooch: error: ONNX files need the package onnx, which is not installed; pip install 'poochplan[onnx]'"
    ]

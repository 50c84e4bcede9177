"""``pooch profile model.onnx``: what it trains, and what it says of a file that it cannot take, in one line."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from poochplan.cli import main
from poochplan.errors import UsageError
from poochplan.formats.profile import Profile
from poochplan.integrations.onnx import load
from poochplan.integrations.onnx.onnx_file import _without_weights, known_shapes
from poochplan.workload import load_workload, parameter_values
from tests.forks import forked, told

WEIGHTS = {"table": (9, 4), "product": (4, 3), "bias": (1,)}


def nodes_of(text: str) -> list[onnx.NodeProto]:
    """As ONNX writes them: ``[name] outputs = Kind <attributes> (inputs)``, one behind the other."""
    return list(parser.parse_graph(f"g () => () {{ {text} }}").node)


ROWS = "[look_up] rows = Gather(table, ids)"
USUAL = f"{ROWS} [multiply] raw = MatMul(rows, product) [add] out = Add(raw, bias)"


def write(
    path: Path,
    nodes: str | Sequence[onnx.NodeProto] = USUAL,
    *,
    opset: int = 18,
    arrays: dict[str, np.ndarray] | None = None,
) -> Path:
    """A model of token indices ``ids`` (batch, length); by default a table, a product and a bias of one number."""
    held = {name: np.full(shape, 0.5, np.float32) for name, shape in WEIGHTS.items()} | (arrays or {})
    graph = helper.make_graph(
        nodes_of(nodes) if isinstance(nodes, str) else nodes,
        "small",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "time steps"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, path)
    return path


def test_a_bias_of_two_layers_is_told_for_an_exporter_may_have_joined_equal_ones(tmp_path: Path) -> None:
    nodes = f"""{ROWS} first = MatMul(rows, square) between = Add(zeros, first)
    second = MatMul(between, other) out = Add(second, zeros)"""
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
    asked = {"loss": loss, "batch": "4", "time_steps": "5"}
    workload = load_workload(str(write(tmp_path / "model.onnx")), asked).workload
    workload.step().backward()
    found = {name: tuple(weight.shape) for name, weight in workload.model.named_parameters() if weight.grad is not None}
    assert found == WEIGHTS


def test_masks_numbers_and_what_is_named_are_no_weights(tmp_path: Path) -> None:
    nodes = f"{ROWS} scaled = Mul(rows, factor) masked = Add(scaled, mask) out = Add(masked, places)"
    numbers = {"factor": [2.0], "mask": [0, 0, 0, -np.inf], "places": [1] * 4}
    arrays = {name: np.array(one, np.float32) for name, one in numbers.items()}
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
    nodes = f"""{ROWS} shape = Shape(rows) batch_size = Gather(shape, first)
    wanted = Concat <axis = 0> (batch_size, rest) out = Reshape(rows, wanted)"""
    arrays = {"first": np.array([0]), "rest": np.array([-1])}
    model = load(write(tmp_path / "model.onnx", nodes, arrays=arrays))
    assert [tuple(model(torch.zeros(size, 5, dtype=torch.int64)).shape) for size in (2, 3)] == [(2, 20), (3, 20)]
    assert len([made for made in model.graph.nodes if made.op == "call_module"]) == 5


NODE = "[the_node] out = {} (table, product)"
DROPPED, LATE = "[the_node] out = Dropout(table, ratio, on)", "[the_node] out = Relu(rows) rows = Gather(table, ids)"
TIMED = '[the_node] out = RNN <hidden_size = 4> (table, product, product, "", lengths)'
WHOLE = {"whole": np.ones(4, np.int64)}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"nodes": NODE.format("NonZero")}, ["'the_node' (NonZero)", "not known"]),
    ({"nodes": NODE.format("com.microsoft.Attention")}, ["'the_node' (Attention)", "com.microsoft"]),
    ({"nodes": NODE.format("BatchNormalization <training_mode = 1>")}, ["'the_node'", "training mode", "model.eval()"]),
    ({"nodes": NODE.format("GRU <hidden_size = 4>")}, ["'the_node' (GRU)", "linear_before_reset=1"]),
    ({"nodes": NODE.format("MaxPool <kernel_shape = [2], storage_order = 1>")}, ["storage_order: expected 0, found 1"]),
    (
        {"nodes": DROPPED, "arrays": {"ratio": np.array(0.5, np.float32), "on": np.array(True)}},
        ["'the_node' (Dropout)"],
    ),
    ({"nodes": TIMED, "arrays": {"lengths": np.array([3], np.int32)}}, ["'the_node' (RNN)", "sequence_lens"]),
    ({"opset": 12}, ["expected opset 13 to 28, found 12"]),
    # what the checker and inference refuse, by node
    ({"nodes": "[the_node] out = MatMul(table)"}, ["checker", "the_node", "MatMul", "input size 1"]),
    ({"nodes": "out = MatMul(table)"}, ["checker", "Name: out OpType: MatMul"]),
    ({"nodes": NODE.format("MatMul <alpha = 1.0>")}, ["checker", "Unrecognized attribute: alpha", "the_node"]),
    ({"nodes": LATE}, ["checker", "topologically sorted", "the_node"]),
    ({"nodes": "[one] out = Relu(table) [two] out = Relu(table)"}, ["checker", "single static assignment", "'out'"]),
    (
        {"nodes": "[the_node] out = MatMul(product, product)"},
        ["types and shapes", "the_node", "Incompatible dimensions"],
    ),
    ({"nodes": "out = MatMul(product, product)"}, ["types and shapes", "node name: out"]),
    ({"nodes": "[the_node] out = Add(table, whole)", "arrays": WHOLE}, ["types and shapes", "node name: the_node"]),
    ({"nodes": "[the_node] out = Shape(table)"}, ["types and shapes", "node name: the_node", "elem type"]),
]


@pytest.mark.parametrize(("made", "says"), REFUSED)
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
    nodes = f"{ROWS} half = Constant <value = float[4] {{0.5, 0.5, 0.5, 0.5}}> () out = Add(rows, half)"
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
    command = [*forked(), "-c", hidden, "profile", str(path), "--loss", "mse", *GIVEN]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert told(ended.stderr) == [
        "pooch: error: ONNX files need the package onnx, which is not installed; pip install 'poochplan[onnx]'"
    ]

"""Each operator gives what ONNX's own reference implementation gives, or is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from poochplan.errors import UsageError
from poochplan.integrations.onnx import load
from poochplan.integrations.onnx.onnx_file import OPSETS, check_graph, known_shapes
from poochplan.integrations.onnx.operators import HOST, OPERATORS

RANDOM = np.random.default_rng(1)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def whole(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@dataclass(frozen=True)
class Case:
    """A node: its operator, an array for each input, and attributes. Inputs from ``held`` on are initialisers."""

    kind: str
    inputs: list[np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    held: int = 1
    outputs: int = 1
    opset: int = 18
    label: str = ""
    opsets: range = OPSETS
    """In which it is this case; another operator of this name takes the same inputs in the others."""

    def model(self, opset: int = 0) -> onnx.ModelProto:
        names = ["" if array is None else f"input_{place}" for place, array in enumerate(self.inputs)]
        made = [f"output_{place}" for place in range(self.outputs)]
        node = helper.make_node(self.kind, names, made, name="it", **self.attributes)
        pairs = list(zip(names, self.inputs, strict=True))
        first, kept = (
            [numpy_helper.from_array(array, name) for name, array in part if array is not None]
            for part in (pairs[: self.held], pairs[self.held :])
        )
        given = [helper.make_tensor_value_info(one.name, one.data_type, list(one.dims)) for one in first]
        results = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in made]
        graph = helper.make_graph([node], "one", given, results, kept)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset or self.opset)], ir_version=9)

    def versions(self) -> list[int]:
        """The opsets from 13 on that changed the operator, of those in which it takes these inputs and attributes."""
        found = {defs.get_schema(self.kind, opset).since_version for opset in OPSETS if defs.has(self.kind, opset)}
        asked = sorted({max(opset, OPSETS[0]) for opset in found}.intersection(self.opsets))
        return [opset for opset in asked if self._is_valid(opset)]

    def _is_valid(self, opset: int) -> bool:
        try:
            check_graph(Path("one.onnx"), self.model(opset))
            known_shapes(Path("one.onnx"), self.model(opset))
        except UsageError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.kind}{'-' if self.label else ''}{self.label}"


SMALL = ["Abs", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish", "Identity", "Mish", "Neg"]
SMALL += ["Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Tan", "Tanh", "Atan"]
SMALL += ["Celu", "Elu", "LeakyRelu", "ThresholdedRelu", "Softmax", "LogSoftmax", "IsNaN", "GlobalAveragePool"]
SMALL += ["GlobalMaxPool", "Flatten", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"]
SMALL += ["ReduceProd", "ReduceSum", "ReduceSumSquare", "ArgMax", "ArgMin", "LpNormalization", "Transpose", "Size"]
POSITIVE = ["Log", "Sqrt", "Reciprocal", "ReduceLogSum"]
WITHIN_ONE = ["Acos", "Asin"]
PAIRS = ["Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"]
COMPARED = ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]
LOGIC = ["And", "Or", "Xor"]
IMAGE = floats(2, 4, 6, 8)
PAIR, FLAT = [floats(4), floats(4)], [floats(2, 5, 32), floats(2, 5, 16), floats(2, 5, 16)]
NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
EYE = np.eye(6, dtype=bool) | (np.arange(6) < 2)


def weights_of(kind: str, directions: int = 1, *, biased: bool = True) -> list[np.ndarray]:
    """Of a recurrent layer from three numbers to four."""
    rows, bias = GATES[kind] * 4, [floats(directions, GATES[kind] * 8)] if biased else []
    return [floats(directions, rows, 3), floats(directions, rows, 4), *bias]


def recurrent(kind: str) -> dict[str, Any]:
    return {"hidden_size": 4} | ({"linear_before_reset": 1} if kind == "GRU" else {})


CASES = [
    *(Case(kind, [IMAGE]) for kind in SMALL),
    *(Case(kind, [np.abs(IMAGE) + 0.1]) for kind in POSITIVE),
    *(Case(kind, [np.tanh(IMAGE)]) for kind in WITHIN_ONE),
    *(Case(kind, [IMAGE, floats(6, 1)]) for kind in PAIRS),
    *(Case(kind, [IMAGE, np.array(0.5, np.float32)], label="scalar") for kind in PAIRS),
    *(Case(kind, [IMAGE, IMAGE.round()]) for kind in COMPARED),
    *(Case(kind, [IMAGE > 0, IMAGE[:, :1] > 1]) for kind in LOGIC),
    Case("Not", [IMAGE > 0]),
    Case("Div", [whole(7, -7, 9), whole(2, 2, -4)], held=2, label="whole"),
    Case("Mod", [whole(7, -7, 9), whole(2, 3, -4)], held=2),
    Case("Mod", [IMAGE, floats(8)], {"fmod": 1}, label="fmod"),
    Case("Mod", [IMAGE, floats(8)], opset=28, label="floats"),
    Case("Pow", [np.abs(IMAGE), np.array(1.5, np.float32)]),
    Case("Where", [IMAGE > 0, IMAGE, np.array(-1.0, np.float32)], held=2),
    Case("Clip", [IMAGE, np.array(-0.5, np.float32), np.array(0.5, np.float32)]),
    Case("Clip", [IMAGE, None, np.array(0.5, np.float32)], label="above"),
    Case("Cast", [IMAGE], {"to": TensorProto.INT64}),
    Case("CastLike", [IMAGE, whole(1)]),
    Case("Dropout", [IMAGE, np.array(0.3, np.float32)]),
    Case("Gelu", [IMAGE], opset=20),
    Case("Gelu", [IMAGE], {"approximate": "tanh"}, opset=20, label="tanh"),
    Case("Swish", [IMAGE], opset=24),
    Case("Swish", [IMAGE], {"alpha": 1.5}, opset=24, label="scaled"),
    Case("PRelu", [IMAGE, floats(4, 1, 1)]),
    Case("MatMul", [IMAGE, floats(8, 3)]),
    Case("Gemm", [floats(3, 4), floats(5, 4), floats(5)], {"transB": 1}),
    Case("Gemm", [floats(4, 3), floats(4, 5), floats(1, 5)], {"transA": 1, "alpha": 0.5, "beta": 2.0}, label="scaled"),
    Case("Einsum", [floats(2, 3, 4), floats(2, 4, 5)], {"equation": "bij,bjk->bik"}),
    Case("Attention", [floats(2, 4, 5, 8), floats(2, 4, 6, 8), floats(2, 4, 6, 7)], held=3, opset=23),
    Case("Attention", [IMAGE, IMAGE, IMAGE, floats(6, 6)], {"is_causal": 1, "scale": 0.5}, opset=23, label="causal"),
    Case("Attention", [IMAGE, IMAGE, IMAGE, EYE], {"is_causal": 1}, opset=23, label="causal and masked", held=3),
    Case("Attention", FLAT, {"q_num_heads": 4, "kv_num_heads": 2}, opset=23, label="flat, grouped", held=3),
    Case("Conv", [IMAGE, floats(6, 4, 3, 3), floats(6)], {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
    Case("Conv", [IMAGE, floats(6, 2, 3, 3)], {"group": 2, "pads": [0, 1, 2, 1]}, label="uneven pads"),
    Case("Conv", [IMAGE, floats(6, 4, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, label="same"),
    Case("Conv", [floats(1, 2, 5, 6, 7), floats(3, 2, 3, 3, 3)], {"dilations": [2, 1, 1]}, label="volume"),
    Case("ConvTranspose", [IMAGE, floats(4, 5, 3, 3)], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    Case("ConvTranspose", [IMAGE, floats(4, 5, 3, 3)], {"strides": [2, 2], "pads": [0, 0, 1, 1]}, label="uneven pads"),
    Case("MaxPool", [IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    Case("AveragePool", [IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    Case("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1}, label="pads"),
    Case("Resize", [IMAGE, None, np.array([1, 1, 2, 2], np.float32)], NEAREST),
    Case("Resize", [IMAGE, None, None, whole(2, 4, 9, 12)], {"mode": "linear"}, label="linear"),
    Case(  # before opset 14 the reference moves the statistics of inference too
        "BatchNormalization", [IMAGE, *(floats(4) for _ in range(3)), np.abs(floats(4)) + 0.5], opsets=range(14, 29)
    ),
    Case("RMSNormalization", [IMAGE, floats(8)], opset=23),
    Case("RMSNormalization", [IMAGE, floats(6, 8)], {"axis": -2, "epsilon": 0.1}, opset=23, label="two axes"),
    Case("InstanceNormalization", [IMAGE, floats(4), floats(4)]),
    Case("LayerNormalization", [IMAGE, floats(8), floats(8)]),
    Case("LayerNormalization", [IMAGE, floats(6, 8)], {"axis": 2}, label="two axes"),
    Case("GroupNormalization", [IMAGE, floats(2), floats(2)], {"num_groups": 2}, opsets=range(18, 21)),
    Case("GroupNormalization", [IMAGE, *PAIR], {"num_groups": 2}, opset=21, label="channels", opsets=range(21, 29)),
    Case("Reshape", [IMAGE, whole(0, -1, 8)]),
    Case("Transpose", [IMAGE], {"perm": [0, 2, 3, 1]}, label="perm"),
    Case("Squeeze", [floats(2, 1, 3, 1), whole(1, -1)]),
    Case("Unsqueeze", [floats(2, 3), whole(0, -1)]),
    Case("Concat", [IMAGE, floats(2, 2, 6, 8)], {"axis": 1}),
    Case("Split", [IMAGE, whole(1, 3)], {"axis": 1}, outputs=2),
    Case("Split", [IMAGE], {"axis": 3, "num_outputs": 3}, outputs=3, label="uneven"),
    Case("Slice", [IMAGE, whole(1, -3), whole(5, 2**62), whole(2, 3), whole(2, 1)]),
    Case("Slice", [IMAGE, whole(-1), whole(-(2**62)), whole(3), whole(-2)], label="backwards"),
    Case("Gather", [floats(7, 4), np.array([[1, 6], [0, 3]])], held=2),
    Case("Gather", [IMAGE, whole(-1, 0)], {"axis": 3}, label="constant"),
    Case("Gather", [IMAGE, np.array([[1, -2]])], {"axis": 2}, held=2, label="axis"),
    Case("GatherElements", [floats(3, 4), np.array([[0, -1], [2, 3], [1, 1]])], {"axis": 1}, held=2),
    Case("GatherND", [IMAGE, np.array([[0, 1], [1, 3]])], held=2),
    Case("ScatterElements", [floats(3, 4), np.array([[0, -1]]), floats(1, 2)], {"axis": 1}, held=3),
    Case("ScatterND", [floats(5, 4), np.array([[1], [3]]), floats(2, 4)], held=3),
    Case("Expand", [floats(3, 1), whole(2, 1, 4)]),
    Case("Tile", [floats(2, 3), whole(2, 1)]),
    Case("Pad", [IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1), np.array(2.0, np.float32)]),
    Case("Pad", [IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1)], {"mode": "reflect"}, label="reflect"),
    Case("Trilu", [floats(4, 5), whole(1)[0]], {"upper": 0}),
    Case("DepthToSpace", [IMAGE], {"blocksize": 2}),
    Case("DepthToSpace", [IMAGE], {"blocksize": 2, "mode": "CRD"}, label="CRD"),
    Case("SpaceToDepth", [IMAGE], {"blocksize": 2}),
    Case("SpaceToDepth", [IMAGE], {"blocksize": 2, "mode": "CRD"}, opset=28, label="CRD"),
    Case("ReduceMean", [IMAGE, whole(2, 3)], {"keepdims": 0}, label="axes"),
    Case("ReduceMean", [IMAGE], {"axes": [1]}, opset=17, label="attribute"),
    Case("TopK", [IMAGE, whole(3)], outputs=2),
    Case("CumSum", [IMAGE, np.array(2)], {"reverse": 1}),
    Case("Shape", [IMAGE], {"start": 1}),
    Case("Range", [np.array(2), np.array(11), np.array(3)], held=0),
    Case("ConstantOfShape", [whole(2, 3)], {"value": numpy_helper.from_array(np.array([4.0], np.float32))}, held=0),
    *(
        Case(kind, [floats(5, 2, 3), *weights_of(kind)], recurrent(kind), outputs=2, held=held)
        for kind in GATES
        for held in (1, 4)
    ),
]


def written(case: Case, folder: Path, opset: int = 0) -> Path:
    path = folder / "one.onnx"
    onnx.save(case.model(opset), path)
    return path


@pytest.mark.parametrize(
    ("case", "opset"), [(case, opset) for case in CASES for opset in case.versions()], ids=lambda part: str(part)
)
def test_an_operator_gives_what_the_reference_gives(case: Case, opset: int, tmp_path: Path) -> None:
    feeds = {f"input_{place}": array for place, array in enumerate(case.inputs[: case.held]) if array is not None}
    wanted = ReferenceEvaluator(case.model(opset)).run(None, feeds)
    with torch.no_grad():
        found = load(written(case, tmp_path, opset))(*map(torch.tensor, feeds.values()))
    for left, right in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
        assert tuple(left.shape) == right.shape
        found_here, wanted_here = torch.tensor(np.array(left, order="C")), torch.tensor(right.copy())
        torch.testing.assert_close(found_here, wanted_here, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("sizes", "wanted"), [(np.array(2), IMAGE[:, 2:4]), (whole(1, 3), IMAGE[:, 1:4])])
def test_a_part_of_a_sequence_is_that_of_the_tensor(sizes: np.ndarray, wanted: np.ndarray, tmp_path: Path) -> None:
    model = Case("SplitToSequence", [IMAGE, sizes], {"axis": 1}).model()
    place = numpy_helper.from_array(np.array(1), "place")
    model.graph.initializer.append(place)
    model.graph.node.append(helper.make_node("SequenceAt", ["output_0", "place"], ["part"]))
    model.graph.output[0].name = "part"
    onnx.save(model, tmp_path / "one.onnx")
    found = load(tmp_path / "one.onnx")(torch.tensor(IMAGE))
    assert torch.equal(found, torch.tensor(wanted))


def test_a_causal_frontier_does_not_depend_on_the_shape_of_the_mask(tmp_path: Path) -> None:
    """The reference implementation takes it from the mask; the operator's text says that it is computed apart."""
    padding = np.array([[[[True] * 5 + [False]]]])
    wanted, found = (
        load(written(Case("Attention", [IMAGE, IMAGE, IMAGE, mask], {"is_causal": 1}, held=3, opset=23), tmp_path))(
            *map(torch.tensor, [IMAGE] * 3)
        )
        for mask in (np.broadcast_to(padding, (1, 1, 6, 6)).copy(), padding)
    )
    assert torch.equal(wanted, found)


@pytest.mark.parametrize("kind", ["Transpose", "Flatten", "Relu", "Softmax"])
def test_a_constant_of_one_number_may_have_dimensions(kind: str, tmp_path: Path) -> None:
    path = written(Case(kind, [np.full((1, 1), 0.5, np.float32)], held=0), tmp_path)
    assert tuple(load(path)().shape) == (1, 1)


def test_the_newest_opset_of_the_package_is_known() -> None:
    assert defs.onnx_opset_version() == OPSETS[-1]


def test_every_operator_has_a_case_and_each_case_an_opset() -> None:
    assert [str(case) for case in CASES if not case.versions()] == []
    assert {case.kind for case in CASES} | {"SplitToSequence", "SequenceAt"} == set(OPERATORS)
    assert set(HOST) <= set(OPERATORS)


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "unbiased"])
@pytest.mark.parametrize("kind", GATES)
def test_a_direction_is_a_forward_layer_of_its_own(kind: str, biased: bool, direction: str, tmp_path: Path) -> None:
    """The reference implementation knows one direction; the others are made of it."""
    both, attributes = 2 if direction == "bidirectional" else 1, recurrent(kind)
    value, weights = floats(5, 2, 3), weights_of(kind, both, biased=biased)
    whole_layer = Case(kind, [value, *weights], {**attributes, "direction": direction}, outputs=2)
    wanted = []
    for place in range(both):
        backwards = direction == "reverse" or place == 1
        part = [weight[place : place + 1] for weight in weights]
        one = Case(kind, [value[::-1].copy() if backwards else value, *part], attributes)
        made = load(written(one, tmp_path))(torch.tensor(one.inputs[0]))
        wanted.append(made.flip(0) if backwards else made)
    found, _ = load(written(whole_layer, tmp_path))(torch.tensor(value))
    torch.testing.assert_close(found, torch.cat(wanted, 1))

"""LSTM, GRU and RNN: one layer in one or both directions, run by torch's own kernels.

ONNX joins the weights of a layer's directions and orders its gates otherwise. Where a file holds them as constants,
they become the parameters that ``torch.nn`` would have (:func:`torch_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .known import Node, operator, to_tensor

_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Which of ONNX's gates come first, second, ... in torch: iofc -> ifco, zrh -> rzh."""
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""What torch calls the weights of a direction, in their order."""


def torch_weights(
    kind: str, weight: torch.Tensor, recurrence: torch.Tensor, bias: torch.Tensor | None
) -> list[torch.Tensor]:
    """The weights as torch has them: for each direction of shape (gates * hidden, ...) two weights, then two biases.

    ``weight`` is (directions, gates * hidden, inputs), ``recurrence`` (directions, gates * hidden, hidden) and ``bias``
    (directions, 2 * gates * hidden).
    """
    order, found = _GATES[kind], []
    for direction in range(weight.shape[0]):
        parts = [weight[direction], recurrence[direction]]
        if bias is not None:
            parts += list(bias[direction].chunk(2))
        for part in parts:
            gates = part.chunk(len(order))
            found.append(torch.cat([gates[gate] for gate in order]) if len(order) > 1 else part)
    return found


def _checked(kind: str) -> Any:
    def check(attributes: Mapping[str, Any]) -> str:
        directions = 2 if attributes.get("direction", "forward") == "bidirectional" else 1
        given = [name.lower() for name in attributes.get("activations") or []]
        usual = (_ACTIVATIONS.get(kind) or given[:1]) * directions
        if (given and given != usual) or any(name not in ("tanh", "relu", "sigmoid") for name in given):
            return f"expected the usual activations, found {', '.join(given)}"
        if kind == "RNN" and "sigmoid" in given:
            return "expected tanh or relu, found sigmoid"
        if kind == "GRU" and not attributes.get("linear_before_reset", 0):
            return "expected linear_before_reset=1, found 0"
        return ""

    return check


_REFUSED = {4: "sequence_lens", 7: "peepholes (P)"}
_ALLOWED = {"clip": (), "layout": (0,), "input_forget": (0,)}


@operator("LSTM", no_weights=(4, 5, 6), allowed=_ALLOWED, refused=_REFUSED, most_outputs=3, check=_checked("LSTM"))
def _lstm(node: Node, value: torch.Tensor, *inputs: Any) -> Any:
    weights, hidden, cell = _taken("LSTM", node, value, inputs)
    found = _directed(
        node,
        value,
        lambda given, both: torch.lstm(
            given, (hidden, cell), weights, _biased(node, weights), 1, 0.0, node.training, both, False
        ),
    )
    return _outputs(node, found)


@operator("GRU", no_weights=(4, 5), allowed=_ALLOWED, refused=_REFUSED, most_outputs=2, check=_checked("GRU"))
def _gru(node: Node, value: torch.Tensor, *inputs: Any) -> Any:
    weights, hidden, _ = _taken("GRU", node, value, inputs)
    found = _directed(
        node,
        value,
        lambda given, both: torch.gru(
            given, hidden, weights, _biased(node, weights), 1, 0.0, node.training, both, False
        ),
    )
    return _outputs(node, found)


@operator("RNN", no_weights=(4, 5), allowed=_ALLOWED, refused=_REFUSED, most_outputs=2, check=_checked("RNN"))
def _rnn(node: Node, value: torch.Tensor, *inputs: Any) -> Any:
    weights, hidden, _ = _taken("RNN", node, value, inputs)
    relu = (node.attributes.get("activations") or ["Tanh"])[0].lower() == "relu"
    function = torch.rnn_relu if relu else torch.rnn_tanh
    found = _directed(
        node,
        value,
        lambda given, both: function(
            given, hidden, weights, _biased(node, weights), 1, 0.0, node.training, both, False
        ),
    )
    return _outputs(node, found)


def _taken(
    kind: str, node: Node, value: torch.Tensor, inputs: tuple[Any, ...]
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Weights in torch's order, and the first states; those that are not given are zeros."""
    weight, recurrence, bias, _, hidden, cell = [*inputs, *[None] * 6][:6]
    split = isinstance(weight, (list, tuple))
    weights = list(weight) if split else torch_weights(kind, weight, recurrence, bias)
    directions, size = _directions(node), weights[1].shape[1]
    states = [
        value.new_zeros(directions, value.shape[1], size) if state is None else to_tensor(state, value.device)
        for state in (hidden, cell)
    ]
    return weights, states[0], states[1]


def _directions(node: Node) -> int:
    return 2 if node.attributes.get("direction", "forward") == "bidirectional" else 1


def _biased(node: Node, weights: list[torch.Tensor]) -> bool:
    return len(weights) == len(NAMES) * _directions(node)


def _directed(node: Node, value: torch.Tensor, function: Any) -> tuple[torch.Tensor, ...]:
    if node.attributes.get("direction", "forward") != "reverse":
        return tuple(function(value, _directions(node) == 2))
    found = function(value.flip(0), False)
    return (found[0].flip(0), *found[1:])


def _outputs(node: Node, found: tuple[torch.Tensor, ...]) -> Any:
    """Of all time steps (time, directions, batch, hidden), then the last states."""
    out, *states = found
    directions = _directions(node)
    out = out.unflatten(-1, (directions, out.shape[-1] // directions)).transpose(1, 2)
    return (out, *states)[: node.outputs] if node.outputs > 1 else out

"""What torch's shape functions leave out of oneDNN's LSTM: its workspace, and that its bias gradients are two tensors.

The workspace is saved for backward and is the largest value of a recurrent layer, so a profile without memory needs its
size. The layout is that of oneDNN's ``rnn_utils::set_offsets``: seven regions, each on a page of its own. The formula
agrees with oneDNN 3 (torch 2.13, float32) on 150 random shapes; ``tests/profiler/test_fake.py`` compares it with the
library that is installed.
"""

from __future__ import annotations

from typing import Any

import torch

INCOMPLETE = frozenset({torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default})
"""The operators whose fake outputs :func:`completed` corrects."""
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_GATES = 4


def completed(func: Any, args: Any, outputs: Any) -> Any:
    """The outputs of an :data:`INCOMPLETE` op with what is missing; called under the fake mode."""
    if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return *outputs[:4], torch.empty_like(outputs[3]), *outputs[5:]
    if args[15]:  # train
        length, batch, features = args[0].shape
        size_bytes = workspace_bytes(length, batch, features, hidden=args[10], element_bytes=args[0].element_size())
        return *outputs[:3], torch.empty(size_bytes, dtype=torch.uint8, device=args[0].device)
    return outputs


def workspace_bytes(length: int, batch: int, features: int, hidden: int, element_bytes: int = 4) -> int:
    """Bytes that one layer and direction of oneDNN's LSTM keeps from forward to backward.

    ``length`` time steps of ``batch`` sequences with ``features`` inputs and ``hidden`` units.
    """
    rows, state_rows = length * batch, 2 * (length + 1) * batch

    def padded(columns: int) -> int:
        """Elements of a row: whole cache lines, and never a multiple of 256, which would share cache sets."""
        line = _LINE_BYTES // element_bytes
        row = -(-columns // line) * line
        return row + line if row % 256 == 0 else row

    regions = [
        rows * padded(_GATES * hidden),
        rows * padded(hidden),
        *[state_rows * padded(max(features, hidden))] * 3,
        *[state_rows * hidden] * 2,
    ]
    return sum(-(-region * element_bytes // _PAGE_BYTES) * _PAGE_BYTES for region in regions)

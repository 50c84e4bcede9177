"""Where torch's shape functions differ from the CPU's kernels in what is saved for backward.

* oneDNN's LSTM keeps a workspace, the largest value of a recurrent layer, of which the shape function says 0 bytes.
  Its layout is that of oneDNN's ``rnn_utils::set_offsets``: seven regions, each on pages of its own. The formula
  agrees with oneDNN 3 (torch 2.13, float32) on 150 random shapes; the tests compare it with the library that is
  installed. The gradients of the two biases are two tensors, not one.
* Batch norm of half-precision features with float32 parameters keeps its statistics in float32.
"""

from __future__ import annotations

from typing import Any

import torch

_LSTM, _LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
CORRECTED = frozenset({_LSTM, _LSTM_BACKWARD, _BATCH_NORM})
"""The operators that :func:`corrected` knows."""
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_GATES = 4


def corrected(func: Any, args: Any, outputs: Any) -> Any:
    """The fake outputs of a :data:`CORRECTED` op as the kernel would make them; called under the fake mode."""
    if func is _LSTM_BACKWARD:
        return *outputs[:4], torch.empty_like(outputs[3]), *outputs[5:]
    if func is _LSTM and args[15]:  # train
        length, batch, features = args[0].shape
        size_bytes = workspace_bytes(length, batch, features, hidden=args[10], element_bytes=args[0].element_size())
        return *outputs[:3], torch.empty(size_bytes, dtype=torch.uint8, device=args[0].device)
    if func is _BATCH_NORM and args[1] is not None and args[1].dtype is not args[0].dtype:
        return outputs[0], *(statistic.to(args[1].dtype) for statistic in outputs[1:])
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

"""For models in ONNX files: an importer to ``torch.fx``, and the training step that ``pooch profile`` runs.

from poochplan.integrations.onnx import load
model = load("model.onnx").train()
"""

from poochplan.errors import UsageError

try:
    import onnx as _onnx  # noqa: F401
except ModuleNotFoundError as missing:
    raise UsageError(
        "ONNX files need the package onnx, which is not installed; pip install 'poochplan[onnx]'"
    ) from missing

from .importing import load

__all__ = ["load"]

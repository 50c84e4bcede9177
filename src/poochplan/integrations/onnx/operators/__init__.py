"""The ONNX operators that the importer supports, with a function of torch for each.

Importing this package fills the table.
"""

from . import elementwise, layers, on_host, structure
from .known import HOST, OPERATORS

__all__ = ["HOST", "OPERATORS", "elementwise", "layers", "on_host", "structure"]

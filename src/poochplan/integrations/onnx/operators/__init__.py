"""The ONNX operators that the importer knows, and the function of torch that runs each.

Importing it fills the table.
"""

from . import elementwise, layers, on_host, structure
from .known import HOST, OPERATORS

__all__ = ["HOST", "OPERATORS", "elementwise", "layers", "on_host", "structure"]

"""Integrations with training libraries and files of theirs. Only the module for a library imports it."""

READERS = {".onnx": "poochplan.integrations.onnx.onnx_training"}
"""By the ending of a workload's file: the module whose ``training_function`` reads it, imported for such a file."""

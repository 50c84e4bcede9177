"""Our partitioner in the compiler's settings, for as long as compiled modules are profiled or follow plans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from poochplan.tensors.modes import compiled_modules
from poochplan.torch_private.compiler_internals import compiles_autograd, inductor_settings, lacking_in_compiler

from .arrivals import parts_are_measured

PARTITIONER, PASSES = "custom_partitioner_fn", "post_grad_custom_post_pass"
"""Inductor's settings that we set."""
_open_blocks = 0
_passes_before: Any = None
_passes: Any = None


@contextlib.contextmanager
def arrivals_compiled(model: torch.nn.Module, device_type: str) -> Iterator[None]:
    """A block in which what is compiled of ``model`` gets arrivals, where :func:`why_none` has nothing against it.

    What was compiled before stays as it is. Blocks may lie in each other, or overlap.
    """
    global _open_blocks, _passes_before, _passes
    if not compiled_modules(model) or why_none(model, device_type):
        yield
        return
    from .anchors import with_anchoring, without_anchoring
    from .partitioner import ArrivingPartitioner

    settings = inductor_settings()
    if not _open_blocks:
        setattr(settings, PARTITIONER, ArrivingPartitioner())
        _passes_before = without_anchoring(getattr(settings, PASSES))
        _passes = with_anchoring(_passes_before)
        setattr(settings, PASSES, _passes)
    _open_blocks += 1
    try:
        yield
    finally:
        _open_blocks -= 1
        if not _open_blocks and isinstance(getattr(settings, PARTITIONER), ArrivingPartitioner):
            setattr(settings, PARTITIONER, None)
        if not _open_blocks and getattr(settings, PASSES) is _passes:
            setattr(settings, PASSES, _passes_before)


def why_no_graphs(device_type: str) -> str:
    """Why graph mode can do nothing here; empty where it can."""
    if device_type != "cpu":
        return "expected a model on the CPU, found it on " + device_type + "; plan it without torch.compile"
    missing = lacking_in_compiler()
    if missing:
        return f"expected {missing} in torch, found {torch.__version__} without: plan the model without torch.compile"
    if not parts_are_measured(device_type):
        return "expected the compiled allocator, found none: install a C++ compiler (pooch doctor --build says more)"
    return ""


def why_none(model: torch.nn.Module, device_type: str) -> str:
    """Why compiled backwards of ``model`` get all that was saved at once; empty where they get it bit by bit, and where
    nothing is compiled.
    """
    if not compiled_modules(model):
        return ""
    if device_type != "cpu":
        return "arrivals within a compiled backward are for the CPU"
    missing = lacking_in_compiler()
    if missing:
        return f"arrivals within a compiled backward need {missing}, and torch {torch.__version__} has none"
    if compiles_autograd():
        return "torch is set to compile autograd too"
    if not parts_are_measured(device_type):
        return "what the parts of a compiled backward take is not known without the compiled allocator"
    settings = inductor_settings()
    if not _open_blocks and not _is_ours(getattr(settings, PARTITIONER)):
        return "custom_partitioner_fn is set already, to one of your own"
    return ""


def _is_ours(partitioner: object) -> bool:
    """Whether nobody else has set it: one of ours may be left where somebody puts settings back as they were."""
    if partitioner is None:
        return True
    from .partitioner import ArrivingPartitioner

    return isinstance(partitioner, ArrivingPartitioner)

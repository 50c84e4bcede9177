"""Options of ``torch.compile`` that graph mode takes: what is the backend's own, and what is torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poochplan.errors import UsageError
from poochplan.torch_private.compiler_internals import inductor_mode

TAKEN = ("fullgraph", "mode", "options")
REFUSED = {"backend": "Inductor's, with graph mode in it", "dynamic": "one plan for each set of shapes"}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for one that graph mode does not take."""
    for name, what in REFUSED.items():
        if options.get(name) is not None:
            raise UsageError(f"compile(): expected no {name}, found {options[name]!r}; graph mode takes {what}")
    for name in options:
        if name not in (*TAKEN, *REFUSED):
            raise UsageError(f"compile(): expected {', '.join(TAKEN[:-1])} or {TAKEN[-1]}, found {name}; leave it out")
    if "reduce-overhead" in str(options.get("mode")) or (options.get("options") or {}).get("triton.cudagraphs"):
        raise UsageError("compile(): expected no CUDA graphs, whose tensors cannot be moved; leave mode out")


def given_to_backend(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings."""
    settings = dict(options.get("options") or {})
    return {**inductor_mode(options["mode"]), **settings} if options.get("mode") else settings


def given_to_torch(options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``Module.compile`` is given beside a backend: shapes are never dynamic."""
    return {"fullgraph": bool(options.get("fullgraph")), "dynamic": False}

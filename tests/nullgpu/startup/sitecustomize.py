"""Read by each Python that starts on the null GPU, which has no cuDNN: torch takes its own kernels instead."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _WithoutCudnn(importlib.abc.MetaPathFinder):
    """Finds torch as everybody does, and switches cuDNN off once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _behind(spec.loader)
        return spec


def _behind(loader: Any) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        module.backends.cudnn.enabled = False
        module.backends.cuda.enable_cudnn_sdp(False)

    loader.exec_module = exec_module


sys.meta_path.insert(0, _WithoutCudnn())

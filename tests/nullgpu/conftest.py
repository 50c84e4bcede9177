"""Files named ``test_on_...`` run on the null GPU alone: elsewhere there are none of them."""

from __future__ import annotations

import os

# Read by cuBLAS when it is first used: what it holds is small beside these networks.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")

from tests.gpu.cases import ON_NULL_GPU

collect_ignore_glob = [] if ON_NULL_GPU else ["test_on_*.py"]

"""The accelerator ``late`` of these tests: built on first use, and then the one of this process for good.

As a plugin of pytest (``-p tests.accelerator.late``) it is loaded before any test.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from poochplan.formats.files import cache_folder

HERE = Path(__file__).parent
SOURCES = ("late_device.cpp", "late_ops.cpp", "late_device.h")
NAME = "late"


def why_not() -> str:
    """Why it cannot be built here; empty if it can."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    return "" if found else "no C++ compiler"


def library() -> Path:
    """The compiled device, next to other compiled parts in the user's cache folder."""
    key = hashlib.sha256(torch.__version__.encode())
    for name in SOURCES:
        key.update((HERE / name).read_bytes())
    file = cache_folder() / "native" / f"late-{key.hexdigest()[:16]}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        folders = library_paths()
        subprocess.run(
            [
                *(os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(scratch)),
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                *(f"-I{path}" for path in include_paths()),
                *(str(HERE / name) for name in SOURCES if name.endswith(".cpp")),
                *(f"-L{path}" for path in folders),
                *(f"-Wl,-rpath,{path}" for path in folders),
                *("-lc10", "-ltorch_cpu", "-ltorch"),
            ],
            check=True,
        )
        scratch.replace(file)
    return file


def load() -> None:
    """Makes it the accelerator of this process, with a module ``torch.late`` as torch asks for."""
    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    ours = torch.ops.late

    def seed(number: int) -> None:
        ours.set_rng_state(torch.Generator().manual_seed(number).get_state())

    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        get_rng_state=lambda device=None: ours.rng_state(),
        set_rng_state=lambda state, device=None: ours.set_rng_state(state),
        manual_seed=seed,
        manual_seed_all=seed,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()


def pytest_configure() -> None:
    load()

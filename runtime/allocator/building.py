"""Building the compiled allocator, for each torch once: it needs c10's headers, which torch brings."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from poochplan.errors import NativeError
from poochplan.native.native_build import NativeBuild


class AllocatorBuild(NativeBuild):
    """As torch was built. libc10 is found by its name, since torch has loaded it: the library serves every environment
    with this torch.
    """

    def __init__(self) -> None:
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        super().__init__("allocator", Path(__file__).parent / "native", ("-std=c++20", abi))

    def facts(self) -> tuple[str, ...]:
        return f"torch-{torch.__version__}", str(torch.version.git_version)

    def options(self) -> list[str]:
        if not sys.platform.startswith("linux"):
            raise NativeError(f"expected Linux for the compiled allocator, found {sys.platform}; use it there")
        folder = Path(torch.__file__).parent
        for part in ("include/c10/core/Allocator.h", "lib/libc10.so"):
            if not (folder / part).exists():
                raise NativeError(
                    f"expected {part} in {folder}, found none; install torch from its wheel, which has it"
                )
        return [f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lc10", "-pthread"]


ALLOCATOR = AllocatorBuild()
library_file, is_built, build = ALLOCATOR.file, ALLOCATOR.is_built, ALLOCATOR.build
why_unavailable, compiler_name = ALLOCATOR.why_unavailable, ALLOCATOR.compiler_name

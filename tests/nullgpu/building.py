"""Builds the null GPU against an environment's own torch and headers. Nothing in the environment is replaced.

The library has the name (``SONAME``) of the CUDA runtime that torch asks for, and is loaded before it. So the loader
takes torch's request as met. cuBLAS is loaded as ever, and never called: the symbols of an earlier library go first.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("machine.cpp", "runtime.cpp", "driver.cpp", "blas.cpp")
_DRIVER, _MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
"""What torch loads by name while it runs."""
_ASKED = re.compile(r" U ((?:__)?cuda[A-Z]\w*|cu[A-Z]\w*|cublas\w+|nvml\w+)")
_NOT_SUPPORTED = {"cublas": 15}
"""What missing calls return, by the beginning of their names; elsewhere 801, ``cudaErrorNotSupported``."""


class NotBuilt(SystemExit):
    """What is missing, in one line."""


def built() -> Path:
    """The folder with the library, next to this Python's packages; builds it if it is not there."""
    packages = _packages()
    runtime = _only(packages, "nvidia/*/lib/libcudart.so.*", "a build of torch for CUDA")
    digest = hashlib.sha256(str(packages).encode())
    for path in (
        *(HERE / name for name in (*SOURCES, "machine.h", Path(__file__).name)),
        packages / "torch/version.py",
    ):
        digest.update(path.read_bytes())
    folder = Path(sys.prefix) / "nullgpu" / digest.hexdigest()[:12]
    if not (folder / _MANAGEMENT).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build(folder, packages, runtime.name)
    return folder


def environment(folder: Path, before: Mapping[str, str]) -> dict[str, str]:
    """What a process needs that is to run on it, and its children."""
    (library,) = folder.glob("libcudart.so.*")
    startup = str(HERE / "startup")
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(folder), before.get("LD_LIBRARY_PATH")))),
        "PYTHONPATH": os.pathsep.join(filter(None, (startup, before.get("PYTHONPATH")))),
        "CUDA_MODULE_LOADING": "LAZY",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def _packages() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotBuilt("null GPU: expected an environment with torch, found none")
    return Path(spec.origin).parents[1]


def _only(packages: Path, pattern: str, what: str) -> Path:
    found = sorted(packages.glob(pattern))
    if not found:
        raise NotBuilt(f"null GPU: expected {what} in {packages}, found no {pattern}")
    return found[0]


def _build(folder: Path, packages: Path, name: str) -> None:
    own = _only(packages, "nvidia/*/include/cuda_runtime_api.h", "the headers of the CUDA runtime").parent
    rest = _only(packages, "**/nvidia/include/crt/host_defines.h", "what these include, as Triton brings it").parents[1]
    compiler = ("g++", "-std=c++17", "-O2", "-fPIC", f"-I{own}", f"-I{rest}")
    parts = [folder / f"{Path(source).stem}.o" for source in (*SOURCES, "missing.cpp")]
    for source, part in zip(SOURCES, parts, strict=False):
        subprocess.run([*compiler, "-c", HERE / source, "-o", part], check=True)
    missing = folder / "missing.cpp"
    missing.write_text(_stubs(sorted(set(_asked(packages)) - set(_symbols(parts[:-1])))), encoding="utf-8")
    subprocess.run([*compiler, "-c", missing, "-o", parts[-1]], check=True)
    library = folder / name
    subprocess.run(["g++", "-shared", f"-Wl,-soname,{name}", "-o", library, *parts, "-lpthread", "-ldl"], check=True)
    for other in (_DRIVER, _MANAGEMENT):
        (folder / other).unlink(missing_ok=True)
        (folder / other).symlink_to(name)


def _asked(packages: Path) -> Iterator[str]:
    """The calls to CUDA of torch's libraries."""
    for path in sorted((packages / "torch" / "lib").glob("*.so")):
        listed = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True)
        yield from _ASKED.findall(re.sub(r"@.*", "", listed.stdout))


def _symbols(parts: list[Path]) -> list[str]:
    listed = subprocess.run(["nm", "--defined-only", *parts], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in listed.stdout.splitlines() if " T " in line]


def _stubs(names: list[str]) -> str:
    """Calls that say once that they are not there, and that they are not supported."""
    lines = ['extern "C" {', "void nullgpu_missing(const char* name);"]
    for name in names:
        status = next((code for start, code in _NOT_SUPPORTED.items() if name.startswith(start)), 801)
        told = f'static const bool told = (nullgpu_missing("{name}"), true); (void)told;'
        lines.append(f'__attribute__((visibility("default"))) int {name}() {{ {told} return {status}; }}')
    return "\n".join((*lines, "}", ""))

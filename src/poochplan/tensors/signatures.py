"""Texts that identify a model, a call or a step: a line for each tensor of a model or call, and the switches of torch
and of a model that change the ops of a step, or their bits.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from poochplan.torch_private.sharding import sharded_parameters
from poochplan.torch_private.tensor_internals import (
    is_training,
    modules_of,
    non_persistent_buffers,
    owned_parameters,
    pytree,
)

from .storages import parts_of

_CUDA: Any = torch.backends.cuda
_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn


@functools.cache
def _accelerator() -> str:
    """The type of device besides the CPU whose autocast counts; without one CUDA's."""
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


_FLAGS: dict[str, Callable[[], object]] = {
    "autocast": lambda: "+".join(map(_autocast, ("cpu", _accelerator()))),
    "autocast_cache": torch.is_autocast_cache_enabled,
    "default": torch.get_default_dtype,
    "matmul": torch.get_float32_matmul_precision,
    "matmul_tf32": lambda: _CUDA.matmul.allow_tf32,
    "matmul_fp16": lambda: _CUDA.matmul.allow_fp16_reduced_precision_reduction,
    "matmul_bf16": lambda: _CUDA.matmul.allow_bf16_reduced_precision_reduction,
    "fp32": lambda: "+".join(
        one.fp32_precision.replace("none", "ieee")  # both mean full precision
        for one in (_CUDA.matmul, _CUDNN.conv, _CUDNN.rnn, _MKLDNN.matmul, _MKLDNN.conv)
    ),
    "cudnn": lambda: _CUDNN.enabled,
    "cudnn_tf32": lambda: _CUDNN.allow_tf32,
    "benchmark": lambda: _CUDNN.benchmark,
    "cudnn_deterministic": lambda: _CUDNN.deterministic,
    "deterministic": torch.get_deterministic_debug_mode,
    "fills": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "flash": _CUDA.flash_sdp_enabled,
    "efficient": _CUDA.mem_efficient_sdp_enabled,
    "math": _CUDA.math_sdp_enabled,
    "cudnn_sdp": lambda: _CUDA.cudnn_sdp_enabled(),
    "mkldnn": lambda: _MKLDNN.enabled,
}

_OF_KERNELS = (
    *("matmul", "matmul_tf32", "matmul_fp16", "matmul_bf16", "fp32"),
    *("cudnn", "cudnn_tf32", "benchmark", "cudnn_deterministic", "deterministic"),
)


def model_tensors(model: torch.nn.Module) -> tuple[str, ...]:
    """``name dtype[shape]`` of all parameters and buffers, in order, independent of the machine.

    A wrapper for data-parallel training has those of its model. For weights that FSDP2 has gathered, possibly in
    another dtype, it has the parameters between steps.
    """
    inner = _unwrapped(model)
    between_steps = sharded_parameters(inner)
    return tuple(
        _line(name.replace("_orig_mod.", ""), between_steps.get(id(tensor), tensor))
        for source in (inner.named_parameters(), inner.named_buffers())
        for name, tensor in source
    )


def passing_buffers(model: torch.nn.Module) -> set[str]:
    """Names of the buffers that are in no state dict. A forward may replace them, with a shape that its inputs need."""
    return {
        f"{path}.{name}".lstrip(".").replace("_orig_mod.", "")
        for path, module in _unwrapped(model).named_modules()
        for name in non_persistent_buffers(module)
    }


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    inner: torch.nn.Module = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    return inner


def input_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """One line for each tensor in the arguments of a call, at any depth: ``0 float32[32, 3, 224, 224]``, ``input_ids
    int64[8, 128]``, ``1.mask bool[8]``. Other arguments are left out.
    """
    return tuple(_line(path, leaf) for path, leaf in (*tensor_leaves("", args), *tensor_leaves("", kwargs)))


def tensor_leaves(path: str, tree: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in a call's arguments, each with its path."""
    found = []
    for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
        inside = ".".join([*([path] if path else []), *(_text(key) for key in keys)])
        if isinstance(leaf, torch.Tensor):
            found.append((inside, leaf))
        elif isinstance(leaf, Mapping):  # for example transformers' BatchEncoding, which is no pytree node
            found += tensor_leaves(inside, dict(leaf))
    return found


def _text(key: Any) -> str:
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _line(path: str, tensor: torch.Tensor) -> str:
    if is_lazy(tensor):  # of a lazy module, until its first forward
        return f"{path} without a shape"
    shape = list(parts_of(tensor)[0].shape if tensor.is_nested else tensor.shape)  # if nested, of all its values
    return f"{path} {str(tensor.dtype).removeprefix('torch.')}{shape}"


def torch_switches() -> dict[str, str]:
    """All switches of torch by name; autocast is that of the calling thread."""
    return {name: str(_read(flag)) for name, flag in _FLAGS.items()}


def kernel_switches(kind: str) -> dict[str, str]:
    """Precision, cuDNN and determinism: the switches that decide which kernels of a GPU a step runs, with their
    seconds, workspace and bits. Empty on the CPU, where a profile has its number of threads.
    """
    return {name: str(_read(_FLAGS[name])) for name in _OF_KERNELS} if kind == "cuda" else {}


def model_switches(model: torch.nn.Module) -> str:
    """Autocast of the calling thread, precision, algorithms, and the modules and parameters that train now."""
    flags = [f"{name}={value}" for name, value in torch_switches().items()]
    modules = tuple(modules_of(model))
    modes = _digest(map(is_training, modules))
    parameters = (one for module in modules for one in owned_parameters(module).values() if one is not None)
    trained = _digest(parameter.requires_grad for parameter in parameters)
    return " ".join((*flags, f"modes={modes}", f"trained={trained}"))


def _autocast(kind: str) -> str:
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else "off"


def _read(flag: Callable[[], object]) -> object:
    try:
        return flag()
    except (RuntimeError, AttributeError):  # another version of torch; or set by the names of both old and new
        return "unknown"


def _digest(flags: Iterable[bool]) -> str:
    return f"{zlib.crc32(bytes(map(bool, flags))):08x}"

"""Roofline: estimated seconds of an op on a device that this machine does not have, from its flops and bytes.

``seconds = max(flops / rate of its dtype, bytes of its inputs and outputs / memory bandwidth) + functions + launch``
(S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009, section 3). ``torch.utils.flop_counter`` counts
the flops: two per multiply-add, and all of causal attention. Operators that only the CPU dispatches have formulas here
(``_FORMULAS``). The estimate ignores caches and occupancy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from poochplan.errors import UsageError
from poochplan.tensors.operators import traits
from poochplan.tensors.storages import storage_key
from poochplan.torch_private.tensor_internals import packet_of, tensors_in

LAUNCH_S = 5e-6
"""Seconds that every kernel takes besides its work: start, tail and the gap to the next kernel."""


class Roofline(msgspec.Struct, frozen=True):
    """A device as two slopes. Its rates are those that dense kernels reach, not those of the data sheet."""

    name: str
    fp32_flops_per_s: float
    """Products of fp32 matrices, in full precision (torch's default)."""
    cudnn_fp32_flops_per_s: float
    """Convolutions and recurrent layers in fp32. By default torch runs them in TF32 if the device has it."""
    half_flops_per_s: float
    """fp16 and bf16, on tensor cores if the device has them."""
    fp64_flops_per_s: float
    memory_bytes_per_s: float
    """Nominal bandwidth of the device's memory."""
    memory_bytes: int
    """Size of the device's memory; 0 if unknown."""
    link: str
    """Name of its usual link (``formats/profile.py``)."""
    element_s: dict[str, float] = {}
    """Additional seconds per element of functions whose arithmetic takes long."""

    def flops_per_s(self, dtype: torch.dtype, cudnn: bool) -> float:
        if dtype in (torch.float16, torch.bfloat16):
            return self.half_flops_per_s
        if dtype in (torch.float64, torch.complex128):
            return self.fp64_flops_per_s
        return self.cudnn_fp32_flops_per_s if cudnn else self.fp32_flops_per_s


_ON_A_CORE = {
    "prims.inductor_random": 15e-9,
    "aten.pow": 1.9e-9,
    "aten.tanh": 1.4e-9,
    "aten.log1p": 1.1e-9,
    "aten.erf": 0.8e-9,
    **dict.fromkeys(("aten.log", "aten.sigmoid"), 0.3e-9),
    **dict.fromkeys(("aten.exp", "aten.sin", "aten.cos"), 0.2e-9),
}
"""Seconds per element of functions, on a core of a CPU."""


_TABLE = (
    # name, fp32, cuDNN's fp32, half, fp64, bytes/s of memory, bytes of memory, link
    # V100 SXM2: data sheet fp32 15.7, tensor cores 125 (fp16), fp64 7.8 TFLOP/s; 900 GB/s; no TF32, no bf16 cores.
    # PoocH's evaluation assumes 12 TFLOP/s of fp32: 77% of the data sheet.
    Roofline("v100", 12e12, 12e12, 100e12, 6e12, 900e9, 16 << 30, "pcie3"),
    # A100 SXM 80 GB: fp32 19.5, TF32 156, bf16 312, fp64 19.5 (tensor cores) TFLOP/s dense; 2,039 GB/s.
    # Large GEMMs of cuBLAS reach 77% of the data sheet without tensor cores, and 70% with them.
    Roofline("a100", 15e12, 110e12, 220e12, 13e12, 2039e9, 80 << 30, "pcie4"),
    # H100 and H200 SXM: fp32 67, TF32 494, bf16 989, fp64 67 (tensor cores) TFLOP/s dense; 3,350 and 4,800 GB/s;
    # 80 and 141 GB.
    Roofline("h100", 50e12, 350e12, 690e12, 47e12, 3350e9, 80 * 10**9, "pcie5"),
    Roofline("h200", 50e12, 350e12, 690e12, 47e12, 4800e9, 141 * 10**9, "pcie5"),
    # P100 SXM2: data sheet fp32 10.6, fp16 21.2, fp64 5.3 TFLOP/s; 732 GB/s; no tensor cores. 77%, as above.
    Roofline("p100", 8.2e12, 8.2e12, 16.3e12, 4.1e12, 732e9, 16 << 30, "pcie3"),
    # GeForce GTX Titan X (Maxwell): fp32 6.6 TFLOP/s at its boost clock, fp64 a 32nd, no faster halves; 336 GB/s.
    Roofline("titan-x", 5.1e12, 5.1e12, 5.1e12, 0.16e12, 336e9, 12 << 30, "pcie3"),
    # One core of a server's CPU with AVX-512, code by Inductor. The slopes are those that products and copies reach.
    # The functions were measured on an EPYC with torch 2.13 (docs/history.md). Random bits are drawn one by one.
    Roofline("cpu-core", 5e10, 5e10, 5e10, 2.5e10, 1e10, 0, "pcie4", _ON_A_CORE),
)
DEVICES = {device.name: device for device in _TABLE}


def parse_roofline(text: str) -> Roofline:
    """The device of that name, or a device from ``FLOPS,BYTES`` per second, such as ``50e12,2e12``.

    A device from numbers has one rate for every dtype, and link ``pcie4``. Raises ``UsageError`` for any other text.
    """
    if text in DEVICES:
        return DEVICES[text]
    parts = text.split(",")
    try:
        rates = [float(part) for part in parts]
    except ValueError:
        rates = []
    if len(rates) != 2 or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise UsageError(
            f"roofline: expected {', '.join(DEVICES)} or FLOPS,BYTES per second such as 50e12,2e12, found {text!r}"
        )
    flops_per_s, bytes_per_s = rates
    return Roofline(text, flops_per_s, flops_per_s, flops_per_s, flops_per_s, bytes_per_s, 0, "pcie4")


def op_seconds(roofline: Roofline, func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> float:
    """Seconds of one dispatched op; 0 for an allocation, which launches no kernel."""
    if traits(func).uninitialised:
        return 0.0
    leaves = tensors_in((args, kwargs, outputs))
    flops = op_flops(func, args, kwargs, outputs)
    arithmetic_s = 0.0
    if flops:
        dtype = next((x.dtype for x in leaves if x.dtype.is_floating_point or x.dtype.is_complex), torch.float32)
        arithmetic_s = flops / roofline.flops_per_s(dtype, cudnn=str(packet_of(func)) in _OF_CUDNN)
    slope_s = max(arithmetic_s, op_bytes(func, args, kwargs, outputs) / roofline.memory_bytes_per_s)
    return slope_s + function_seconds(roofline, func, outputs) + LAUNCH_S


def function_seconds(roofline: Roofline, func: Any, outputs: Any) -> float:
    """The additional seconds of the op's function, which it also takes as part of another kernel."""
    element_s = roofline.element_s.get(str(packet_of(func)), 0.0)
    return element_s * outputs.numel() if element_s and isinstance(outputs, torch.Tensor) else 0.0


def op_flops(func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> int:
    """Floating-point operations; 0 for operators without a formula, which memory bounds."""
    packet = packet_of(func)
    own = _FORMULAS.get(str(packet))
    if own is not None:
        return int(own(args))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


_OF_CUDNN = frozenset(
    {"aten.convolution", "aten.convolution_backward", "aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"}
)
# These arguments (by position) are read only as far as the output or the indices need.
_GATHERS = {"embedding": (0,), "index": (0,), "gather": (0,), "index_select": (0,), "nll_loss_forward": (0,)}


def op_bytes(func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> int:
    """Bytes that cross the memory bus if each input is read once and each output is written once.

    An argument written in place counts twice, or once if it is not read. A returned view does not count.
    """
    facts = traits(func)
    known = {storage_key(x) for x in tensors_in((args, kwargs)) if _has_bytes(x)}
    written_bytes = sum(_bytes(x) for x in tensors_in(outputs) if _has_bytes(x) and storage_key(x) not in known)
    gathered = _GATHERS.get(facts.name.split(".")[1] if "." in facts.name else "", ())
    total = written_bytes
    for position, argument in enumerate((*args, *kwargs.values())):
        for size_bytes in map(_bytes, tensors_in(argument)):
            total += min(size_bytes, written_bytes) if position in gathered else size_bytes
    for position in facts.written:
        if position < len(args) and not (facts.overwriting and position == 0):
            total += sum(map(_bytes, tensors_in(args[position])))
    return total


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements; repeated elements of an expanded tensor count once."""
    if not _has_bytes(tensor):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _convolution_backward(args: Any) -> int:
    """The forward's flops for each requested gradient: of the input and of the weight.

    Torch's formula would count the weight's gradient of a grouped convolution once per group.
    """
    grad, inputs, weight = args[:3]
    transposed, output_mask = args[7], args[10]
    positions = (inputs if transposed else grad).shape[2:].numel()
    return int(2 * inputs.shape[0] * positions * weight.numel() * sum(output_mask[:2]))


def _rnn_layer(args: Any) -> int:
    """Two per weight and position of the input ``[length, batch, features]``."""
    length, batch = args[0].shape[:2]
    return int(2 * length * batch * (args[1].numel() + args[2].numel()))


_FORMULAS: dict[str, Callable[[Any], int]] = {
    "aten.convolution_backward": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda args: sdpa_flop_count(*(x.shape for x in args[:3])),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda args: sdpa_backward_flop_count(
        *(x.shape for x in args[:4])
    ),
    "aten.mkldnn_rnn_layer": _rnn_layer,
    "aten.mkldnn_rnn_layer_backward": lambda args: 2 * _rnn_layer(args),  # gradients of the input and of the weights
}

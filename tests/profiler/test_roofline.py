"""An op takes as long as its flops or its bytes do, whichever is longer, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poochplan.profiler.fake.roofline import DEVICES, LAUNCH_S, op_bytes, op_flops, op_seconds, parse_roofline


class Ops(TorchDispatchMode):
    """Every op of a block with its arguments and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.calls[str(func).split(".")[1]] = func, args, kwargs or {}, outputs
        return outputs


def test_a_product_of_matrices_takes_its_flops() -> None:
    with Ops() as ops:
        torch.randn(512, 1024) @ torch.randn(1024, 2048)
    flops, size_bytes = 2 * 512 * 1024 * 2048, 4 * (512 * 1024 + 1024 * 2048 + 512 * 2048)
    assert op_flops(*ops.calls["mm"]) == flops
    assert op_bytes(*ops.calls["mm"]) == size_bytes
    assert op_seconds(DEVICES["v100"], *ops.calls["mm"]) == pytest.approx(flops / 12e12 + LAUNCH_S)
    assert op_seconds(parse_roofline("1e15,1e9"), *ops.calls["mm"]) == pytest.approx(size_bytes / 1e9 + LAUNCH_S)


def test_half_precision_takes_the_tensor_cores() -> None:
    with Ops() as ops:
        torch.randn(512, 4096, dtype=torch.bfloat16) @ torch.randn(4096, 512, dtype=torch.bfloat16)
    flops = 2 * 512 * 4096 * 512
    assert op_seconds(DEVICES["v100"], *ops.calls["mm"]) == pytest.approx(flops / 100e12 + LAUNCH_S)


def test_an_elementwise_op_takes_its_bytes_and_in_place_as_many() -> None:
    image = torch.randn(1000, 1000)
    with Ops() as ops:
        torch.relu(image)
        image.add_(1.0)
    for name in ("relu", "add_"):
        assert op_bytes(*ops.calls[name]) == 2 * 4 * 10**6
        assert op_seconds(DEVICES["v100"], *ops.calls[name]) == pytest.approx(8e6 / 900e9 + LAUNCH_S)


def test_on_a_processor_dear_functions_take_their_elements_on_top() -> None:
    image, core = torch.randn(1000, 1000), DEVICES["cpu-core"]
    with Ops() as ops:
        torch.tanh(image)
        torch.relu(image)
    relu_s, tanh_s = (op_seconds(core, *ops.calls[name]) for name in ("relu", "tanh"))
    assert tanh_s - relu_s == pytest.approx(1e6 * core.element_s["aten.tanh"])
    assert core.element_s["prims.inductor_random"] > 10 * core.element_s["aten.tanh"]
    assert not DEVICES["v100"].element_s


def test_what_is_only_written_counts_once_and_an_allocation_takes_no_time() -> None:
    with Ops() as ops:
        torch.empty(1000).zero_()
    assert op_bytes(*ops.calls["zero_"]) == 4000
    assert op_seconds(DEVICES["v100"], *ops.calls["empty"]) == 0.0


def test_a_lookup_reads_the_rows_it_asks_for() -> None:
    with Ops() as ops:
        torch.nn.functional.embedding(torch.zeros(8, dtype=torch.int64), torch.randn(10_000, 16))
    assert op_bytes(*ops.calls["embedding"]) == 8 * 8 + 2 * 8 * 16 * 4


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_goes_back_with_twice_its_flops(groups: int) -> None:
    images = torch.randn(2, 8, 10, 10, requires_grad=True)
    weight = torch.randn(16, 8 // groups, 3, 3, requires_grad=True)
    with Ops() as ops:
        torch.nn.functional.conv2d(images, weight, groups=groups).sum().backward()
    forward = 2 * 2 * 8 * 8 * weight.numel()
    assert op_flops(*ops.calls["convolution"]) == forward
    assert op_flops(*ops.calls["convolution_backward"]) == 2 * forward


def test_attention_of_the_cpu_counts_its_two_products() -> None:
    query, key, value = (torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))
    with Ops() as ops:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    product = 2 * 2 * 4 * 64 * 64 * 32
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert op_flops(*ops.calls[name]) == 2 * product
    assert op_flops(*ops.calls[f"{name}_backward"]) == 5 * product  # the scores once more, and four gradients


def test_an_lstm_multiplies_each_weight_once_per_position() -> None:
    lstm = torch.nn.LSTM(16, 32)
    with Ops() as ops:
        lstm(torch.randn(5, 3, 16, requires_grad=True))[0].sum().backward()
    forward = 2 * 5 * 3 * 4 * 32 * (16 + 32)
    assert op_flops(*ops.calls["mkldnn_rnn_layer"]) == forward
    assert op_flops(*ops.calls["mkldnn_rnn_layer_backward"]) == 2 * forward


def test_a_device_by_numbers_has_one_rate_for_every_dtype() -> None:
    device = parse_roofline("50e12,2e12")
    rates = {device.flops_per_s(dtype, cudnn) for dtype in (torch.float32, torch.bfloat16) for cudnn in (True, False)}
    assert rates == {50e12}
    assert (device.memory_bytes_per_s, device.link) == (2e12, "pcie4")

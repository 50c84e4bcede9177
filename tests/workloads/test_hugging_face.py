"""``hf:NAME`` trains any model of transformers by the name of its configuration, with and without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.profile import Kind
from poochplan.profiler.fake.fake import building
from poochplan.workload import LoadedWorkload, Workload, load_workload

pytest.importorskip("transformers")

TEXT = {"length": 16, "layers": 2, "hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4, "batch_size": 2}
GATED = {**TEXT, "intermediate_size": 48, "num_key_value_heads": 2}
SMALL: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "qwen2": GATED,
    "mixtral": {**GATED, "num_local_experts": 4},
    "gpt2": TEXT,
    "bert": {**TEXT, "intermediate_size": 48},
    "t5": {"length": 8, "layers": 2, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "vocab_size": 64},
    "vit": {"layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 32},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic"},  # of any size
    "whisper": {
        "length": 8,
        "layers": 2,
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 64,
        "max_source_positions": 20,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "suppress_tokens": "[]",
        "begin_suppress_tokens": "[]",
    },
}


def _loaded(name: str, **settings: object) -> LoadedWorkload:
    given: Mapping[str, object] = SMALL.get(name, {}) | settings
    return load_workload(f"hf:{name}", {key: str(value) for key, value in given.items()})


@pytest.mark.parametrize("name", SMALL)
def test_each_kind_of_model_trains_all_of_its_parameters(name: str) -> None:
    workload = _loaded(name).workload
    workload.step().backward()  # type: ignore[no-untyped-call]
    without = [key for key, one in workload.model.named_parameters() if one.requires_grad and one.grad is None]
    assert not without
    assert sum(1 for one in workload.model.parameters() if one.grad is not None and one.grad.abs().sum() > 0) > 10


def _saved_dtypes(workload: Workload) -> set[torch.dtype]:
    saved = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        workload.step()
    return saved


@pytest.mark.parametrize(
    ("precision", "parameters", "is_upcast"),
    [("float32", torch.float32, False), ("bfloat16", torch.bfloat16, True), ("autocast", torch.float32, True)],
)
def test_precision_is_that_of_parameters_and_of_computation(
    precision: str, parameters: torch.dtype, is_upcast: bool
) -> None:
    workload = _loaded("llama", precision=precision).workload
    saved = _saved_dtypes(workload)
    assert {one.dtype for one in workload.model.parameters()} == {parameters}
    assert (torch.bfloat16 in saved) is is_upcast


def test_a_step_in_float32_is_under_the_callers_autocast() -> None:
    workload = _loaded("llama").workload
    with torch.autocast("cpu", torch.bfloat16):
        assert _saved_dtypes(workload) == {torch.bfloat16, torch.float32, torch.int64}


@pytest.mark.parametrize("name", ["llama", "vit", "whisper"])
def test_a_large_model_is_built_and_profiled_without_memory(name: str) -> None:
    with building():
        loaded = load_workload(f"hf:{name}", {"layers": "2", "length": "64", "precision": "bfloat16"})
    workload = loaded.workload
    profile = poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, mode="fake", roofline="h100"
    )
    assert profile.mode == "fake"
    whole_bytes = 2 * sum(one.numel() for one in workload.model.parameters())
    assert 0 <= profile.static_bytes[Kind.PARAMETER] - whole_bytes < whole_bytes / 100  # rounded up one by one


def test_layers_are_those_of_encoder_and_decoder() -> None:
    model = _loaded("whisper", layers=3).workload.model
    assert (len(model.model.encoder.layers), len(model.model.decoder.layers)) == (3, 3)  # type: ignore[union-attr, arg-type]


def test_positions_are_as_many_as_the_text_is_long() -> None:
    _loaded("bert", length=600, batch_size=1).workload.step()  # BERT's own are 512


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("lama", {}, ["hf:lama", "expected the name of a configuration", "did you mean hf:llama?"]),
        ("dac", {}, ["hf:dac", "expected a model of text, images or speech"]),
        ("llama", {"hiden_size": 8}, ["unknown parameter 'hiden_size'", "did you mean hidden_size?"]),
        ("llama", {"precision": "half"}, ["precision", "expected", "half"]),
        ("llama", {"hidden_size": 33}, ["hf:llama", "transformers refuses"]),
    ],
)
def test_what_transformers_does_not_have_is_one_line(name: str, settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        _loaded(name, **settings)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "\n" not in str(raised.value)

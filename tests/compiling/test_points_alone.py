"""Points in compiled code, with nothing swapped or recomputed: loss and gradients are those of stock Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache

from poochplan.compiling.rounds import bits_of_a_step
from poochplan.formats.run_record import StepDigests
from poochplan.runtime.compiled.inductor import GraphBackend
from tests.runtime.served import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.cpu_device,
    pytest.mark.deep,
]
TOKENS, CLASSES = 64, 2
LAYERS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT: dict[str, Any] = {**LAYERS, "vocab_size": TOKENS, "max_position_embeddings": 64}
OF_TEXT: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": TEXT,
    "RobertaForMaskedLM": TEXT,
    "ElectraForMaskedLM": {**TEXT, "embedding_size": 16},
    "LlamaForCausalLM": TEXT,
    "GPT2LMHeadModel": {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "T5ForConditionalGeneration": {
        "vocab_size": TOKENS,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
}
OF_IMAGES: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {**LAYERS, "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.1},
    "ResNetForImageClassification": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 2],
        "layer_type": "basic",
    },
    "ConvNextForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2},
    "SwinForImageClassification": {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
        "image_size": 32,
        "patch_size": 2,
    },
}


def made(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The network, and what it is given."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**(OF_TEXT | OF_IMAGES)[name])).train()
    if name in OF_TEXT:
        tokens = torch.randint(4, TOKENS, (4, 32))
        return model, {"input_ids": tokens, "labels": tokens}
    return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(CLASSES, (4,))}


def bits(name: str, precision: str, backend: str | Callable[..., Any]) -> StepDigests:
    torch._dynamo.reset()
    model, given = made(name)
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
        given = {key: one.bfloat16() if one.is_floating_point() else one for key, one in given.items()}
    model.compile(backend=backend, dynamic=False)

    def step() -> Any:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return model(**given).loss

    with fresh_cache():
        return bits_of_a_step(step, model, None)


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("name", [*OF_TEXT, *OF_IMAGES])
def test_all_bits_are_those_of_stock_code(name: str, precision: str) -> None:
    assert bits(name, precision, GraphBackend()) == bits(name, precision, "inductor")

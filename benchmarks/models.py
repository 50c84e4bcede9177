"""Twelve third-party models as workloads: unmodified, from transformers and MONAI, a step of 0.2 to 1 s on one core.

Random weights and data, train mode, AdamW with the library's defaults. Each is built anew from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poochplan.workload import Workload

VOCABULARY, CLASSES = 4096, 10
Inputs = Callable[[], dict[str, torch.Tensor]]


def build(name: str) -> Workload:
    """The workload of that name, from the same seed each time."""
    torch.manual_seed(0)
    model, step = MODELS[name]()
    return Workload(model, step, torch.optim.AdamW(model.parameters()))


Made = tuple[nn.Module, Callable[[], torch.Tensor]]


def hugging(kind: str, head: str, inputs: Inputs, **config: Any) -> Callable[[], Made]:
    """``AutoModelFor<head>`` of transformers on a configuration; its own loss."""

    def make() -> Made:
        import transformers

        settings = transformers.AutoConfig.for_model(kind, **config)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(settings).train()
        batch = inputs()

        def step() -> torch.Tensor:
            loss: torch.Tensor = model(**batch).loss
            return loss

        return model, step

    return make


def _monai(network: str, shape: tuple[int, ...], **options: Any) -> Callable[[], Made]:
    """A network of MONAI on a volume; Dice and cross entropy against a random map."""

    def make() -> Made:
        from monai.losses import DiceCELoss
        from monai.networks import nets

        model = getattr(nets, network)(**options).train()
        volume, labels = torch.randn(shape), torch.randint(CLASSES, (shape[0], 1, *shape[2:]))
        dice = DiceCELoss(to_onehot_y=True, softmax=True)

        def step() -> torch.Tensor:
            found = model(volume)
            loss: torch.Tensor = dice(found[0] if isinstance(found, list | tuple) else found, labels)
            return loss

        return model, step

    return make


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _text(batch: int, length: int) -> Inputs:
    def inputs() -> dict[str, torch.Tensor]:
        tokens = _tokens(batch, length)
        return {"input_ids": tokens, "labels": tokens}

    return inputs


def images(batch: int, size: int) -> Inputs:
    return lambda: {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(CLASSES, (batch,))}


WIDTH: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDTH |= {"intermediate_size": 1024}
_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "use_cache": False}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_TEXT = WIDTH | _TOKENS | _ENDS
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 192, "n_embd": 256, "n_layer": 4, "n_head": 4}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
_T5 = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 768}
_SPEECH = {"d_model": 192, "num_mel_bins": 80, "max_source_positions": 300, "max_target_positions": 64}
_SPEECH |= {f"{side}_{name}": count for side in ("encoder", "decoder") for name, count in _SIDE.items()}
_SPEECH |= _TOKENS | _ENDS | {"decoder_start_token_id": 1}
_IMAGES = {"image_size": 112, "num_labels": CLASSES}
VIT = WIDTH | _IMAGES | {"patch_size": 8}
SWIN = _IMAGES | {"patch_size": 4, "embed_dim": 48, "depths": [2, 2, 4], "num_heads": [3, 6, 12], "window_size": 7}
_CONVNEXT = {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 4, 2], "num_labels": CLASSES}
_RESNET = {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 3, 2], "num_labels": CLASSES}
_MOBILE = {"depth_multiplier": 0.75, "image_size": 128, "num_labels": CLASSES}
_VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": CLASSES}


def image_model(kind: str, batch: int, size: int, **config: Any) -> Callable[[], Made]:
    return hugging(kind, "ImageClassification", images(batch, size), **config)


def _speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(4, 80, 600), "labels": _tokens(4, 48)}


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": hugging("gpt2", "CausalLM", _text(4, 192), **_GPT2),
    "llama": hugging("llama", "CausalLM", _text(4, 192), **_TEXT, num_key_value_heads=2, max_position_embeddings=192),
    "bert": hugging("bert", "MaskedLM", _text(4, 192), **_TEXT, max_position_embeddings=192),
    "t5": hugging("t5", "Seq2SeqLM", _text(4, 128), **_TOKENS, **_T5),
    "vit": image_model("vit", 4, 112, **VIT),
    "swin": image_model("swin", 8, 112, **SWIN),
    "convnext": image_model("convnext", 8, 112, **_CONVNEXT),
    "resnet": image_model("resnet", 16, 112, **_RESNET),
    "mobilenet_v2": image_model("mobilenet_v2", 4, 128, **_MOBILE),
    "whisper": hugging("whisper", "SpeechSeq2Seq", _speech, **_SPEECH),
    "monai_basicunet": _monai("BasicUNet", (1, 1, 48, 48, 48), **_VOLUME, features=(12, 12, 24, 48, 96, 12)),
    "monai_segresnet": _monai(
        "SegResNet", (1, 1, 32, 32, 32), **_VOLUME, init_filters=8, blocks_down=(1, 2, 2), blocks_up=(1, 1)
    ),
}

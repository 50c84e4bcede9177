"""Unmodified networks of transformers, MONAI and torch.nn: built from configurations, small, in train mode."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule
from tests.planner.plans import random_decisions, random_tuning
from tests.runtime.nets import Case

Tensor = torch.Tensor
Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]
VOCABULARY, LENGTH, CLASSES = 64, 16, 5

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
"""What most configurations of transformers call their sizes."""
GROUPED = TINY | {"num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.1}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}

NETWORKS: dict[str, Case] = {}
QUICK = ("gpt2", "llama", "bert", "vit", "convnext", "poolformer", "monai_unet", "torch_encoder")
"""Those whose tests run every day."""


def _enter(name: str, make: Callable[[], Made]) -> None:
    NETWORKS[name] = Case(make)


def random_schedule(profile: Profile, problem: Problem, seed: int) -> Schedule:
    """Random decisions, random points, and a random budget between the smallest and the in-core peak, fitted to it."""
    smallest, share = smallest_budget(profile), random.Random(seed).random()
    budget_bytes = smallest + int(share * (profile.in_core_peak_bytes - smallest))
    return fit(problem, random_decisions(problem, seed), budget_bytes, tuning=random_tuning(problem, seed))


def _hugging(name: str, head: str, config: Mapping[str, Any], inputs: Callable[[], dict[str, Tensor]]) -> None:
    """A network of transformers: ``AutoModelFor<head>`` on a configuration; its loss on ``inputs()``."""

    def make() -> Made:
        import transformers

        settings = transformers.AutoConfig.for_model(name.replace("_", "-") if name in _DASHED else name, **config)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(settings).train()
        batch = inputs()
        return model, lambda model: model(**batch).loss

    _enter(name, make)


_DASHED = {"deberta_v2", "xlm_roberta"}


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, LENGTH))


def _own_labels() -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _masked_labels() -> dict[str, Tensor]:
    tokens = _tokens()
    seen = torch.ones_like(tokens)
    seen[1, -5:] = 0
    return {"input_ids": tokens.clone(), "attention_mask": seen, "labels": tokens.masked_fill(tokens % 3 > 0, -100)}


def _images(size: int, channels: int = 3) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(2, channels, size, size), "labels": torch.randint(CLASSES, (2,))}


for _name, _config in {
    "gpt2": {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 8},
    "qwen2": GROUPED,
    "gemma": GROUPED,
    "phi": GROUPED | {"resid_pdrop": 0.1},
    "gpt_neox": TINY | {"hidden_dropout": 0.1},
    "opt": TINY | {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.0},
    "bloom": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "hidden_dropout": 0.1,
        "use_cache": False,
    },
    "falcon": TINY | {"hidden_dropout": 0.1},
    "mixtral": GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "use_cache": False},
    "stablelm": GROUPED,
    "olmo": GROUPED,
    "gpt_neo": TINY
    | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
}.items():
    _hugging(_name, "CausalLM", _config, _own_labels)

for _name, _config in {
    "bert": TINY,
    "roberta": TINY | {"max_position_embeddings": 40},
    "electra": TINY | {"embedding_size": 16},
    "deberta_v2": TINY | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "albert": TINY | {"embedding_size": 16, "hidden_dropout_prob": 0.1},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 32,
    },
    "mobilebert": TINY | {"embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 2},
    "convbert": TINY | {"embedding_size": 32, "conv_kernel_size": 3},
    "fnet": TINY,
    "squeezebert": TINY | {"embedding_size": 32},
    "mpnet": TINY | {"max_position_embeddings": 40},
}.items():
    _hugging(_name, "MaskedLM", _config, _masked_labels)

for _name, _config in {
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "use_cache": False,
    },
    "bart": ENCODER_DECODER,
}.items():
    _hugging(_name, "Seq2SeqLM", _config, _masked_labels)

_VISION = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES, "hidden_dropout_prob": 0.1}
for _name, _config in {
    "vit": TINY | _VISION,
    "swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": CLASSES,
        "drop_path_rate": 0.2,
    },
    "convnext": {
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "num_stages": 2,
        "num_labels": CLASSES,
        "drop_path_rate": 0.2,
    },
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": CLASSES},
    "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": 32, "num_labels": CLASSES},
    "regnet": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "groups_width": 8,
        "num_labels": CLASSES,
    },
    "poolformer": {
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "num_encoder_blocks": 2,
        "num_labels": CLASSES,
    },
}.items():
    _hugging(_name, "ImageClassification", _config, _images(16 if _name == "vit" else 32))


def _segments() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(CLASSES, (2, 8, 8))}


_hugging(
    "segformer",
    "SemanticSegmentation",
    {
        "hidden_sizes": [16, 32, 32, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 16,
        "num_labels": CLASSES,
    },
    _segments,
)
_hugging(
    "whisper",
    "SpeechSeq2Seq",
    ENCODER_DECODER | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "dropout": 0.1},
    lambda: {"input_features": torch.randn(2, 8, 40), "labels": _tokens()},
)
_hugging(
    "wav2vec2",
    "CTC",
    TINY
    | {
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
        "ctc_loss_reduction": "mean",
    },
    lambda: {"input_values": torch.randn(2, 400), "labels": torch.randint(3, VOCABULARY, (2, 6))},
)


def _clip() -> Made:
    import transformers

    text = transformers.CLIPTextConfig(**TINY)
    vision = transformers.CLIPVisionConfig(**TINY | {"image_size": 16, "patch_size": 4})
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    model = transformers.CLIPModel(config).train()
    batch = {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, 16, 16)}
    return model, lambda model: model(**batch, return_loss=True).loss


_enter("clip", _clip)


def _monai(name: str, network: str, shape: tuple[int, ...], classes: int = CLASSES, **options: Any) -> None:
    """A network of MONAI on images or volumes of ``shape``; Dice and cross entropy against a random map or class."""

    def make() -> Made:
        from monai.losses import DiceCELoss
        from monai.networks import nets

        model = getattr(nets, network)(**options).train()
        images = torch.randn(shape)
        where = torch.randint(classes, (shape[0], 1, *shape[2:]))
        labels = where.flatten(1)[:, 0]  # of one storage: nothing is there that the step does not read
        dice = DiceCELoss(to_onehot_y=True, softmax=True)

        def loss_of(model: nn.Module) -> Tensor:
            found = model(images)
            found = found[0] if isinstance(found, tuple | list) else found
            if found.dim() == 2:
                return F.cross_entropy(found, labels)
            if found.dim() == len(shape) + 1:  # deep supervision: one more dimension
                found = found[:, 0]
            return dice(found, where)

        return model, loss_of

    _enter(name, make)


_FLAT, _CUBE = (2, 1, 32, 32), (1, 1, 16, 16, 16)
_2D = {"spatial_dims": 2, "in_channels": 1, "out_channels": CLASSES}
_3D = {"spatial_dims": 3, "in_channels": 1, "out_channels": CLASSES}
_monai("monai_unet", "UNet", _CUBE, **_3D, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, dropout=0.1)
_monai("monai_basicunet", "BasicUNet", _FLAT, **_2D, features=(4, 4, 8, 8, 8, 4), dropout=0.1)
_monai("monai_attentionunet", "AttentionUnet", _FLAT, **_2D, channels=(4, 8, 8), strides=(2, 2), dropout=0.1)
_monai(
    "monai_vnet",
    "VNet",
    (2, 1, 16, 16),
    spatial_dims=2,
    in_channels=1,
    out_channels=CLASSES,
    dropout_dim=2,
    dropout_prob_up=(0.1, 0.1),
)
_monai(
    "monai_segresnet", "SegResNet", _CUBE, **_3D, init_filters=8, blocks_down=(1, 1), blocks_up=(1,), dropout_prob=0.1
)
_monai(
    "monai_unetr",
    "UNETR",
    (1, 1, 16, 16, 16),
    in_channels=1,
    out_channels=CLASSES,
    img_size=(16, 16, 16),
    feature_size=4,
    hidden_size=32,
    mlp_dim=48,
    num_heads=4,
    dropout_rate=0.1,
)
_monai(
    "monai_swinunetr",
    "SwinUNETR",
    (1, 1, 64, 64),
    in_channels=1,
    out_channels=CLASSES,
    feature_size=12,
    spatial_dims=2,
    depths=(1, 1, 1, 1),
    num_heads=(1, 2, 2, 4),
    window_size=4,
    drop_rate=0.1,
)
_monai(
    "monai_dynunet",
    "DynUNet",
    _FLAT,
    **_2D,
    kernel_size=(3, 3, 3),
    strides=(1, 2, 2),
    upsample_kernel_size=(2, 2),
    filters=(4, 8, 8),
    deep_supervision=True,
    deep_supr_num=1,
)
_monai(
    "monai_densenet", "DenseNet", _FLAT, **_2D, init_features=8, growth_rate=4, block_config=(2, 2), dropout_prob=0.1
)
_monai(
    "monai_resnet",
    "ResNet",
    (2, 1, 16, 16, 16),
    block="basic",
    layers=[1, 1, 1, 1],
    block_inplanes=[4, 8, 8, 16],
    n_input_channels=1,
    num_classes=CLASSES,
)
_monai("monai_highresnet", "HighResNet", (1, 1, 16, 16), **_2D, dropout_prob=0.1)
_monai(
    "monai_vit",
    "ViT",
    _FLAT,
    in_channels=1,
    img_size=(32, 32),
    patch_size=8,
    hidden_size=32,
    mlp_dim=48,
    num_layers=2,
    num_heads=4,
    classification=True,
    num_classes=CLASSES,
    spatial_dims=2,
    dropout_rate=0.1,
)


def _transformer() -> Made:
    model = nn.Transformer(32, 4, 2, 2, 48, batch_first=True)
    source, target = torch.randn(2, 12, 32), torch.randn(2, 8, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    return model, lambda model: model(source, target, tgt_mask=mask).square().mean()


def _encoder() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 48, activation="gelu", batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, nn.LayerNorm(32), enable_nested_tensor=False)
    batch, padding = torch.randn(3, 10, 32), torch.arange(10).expand(3, 10) > torch.tensor([[9], [6], [4]])
    return model, lambda model: model(batch, src_key_padding_mask=padding).square().mean()


_enter("torch_transformer", _transformer)
_enter("torch_encoder", _encoder)

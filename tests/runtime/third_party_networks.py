"""Unmodified networks of transformers, MONAI and torch.nn: built from configurations, small, in train mode."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from pathlib import Path
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

SIZES: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parents[1] / "data" / "networks.toml").read_text())
"""Of each network, by the class of transformers that it is made for."""

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


def _sizes(given: dict[str, Any]) -> dict[str, Any]:
    """With those that it starts from."""
    own = {name: size for name, size in given.items() if name != "like"}
    return _sizes(SIZES["sizes"][given["like"]]) | own if "like" in given else own


def _hugging(head: str, inputs: Callable[[str], dict[str, Tensor]]) -> None:
    """Networks of transformers: ``AutoModelFor<head>`` on a configuration; its loss on ``inputs(name)``."""
    for name, sizes in SIZES[head].items():

        def make(name: str = name, sizes: dict[str, Any] = sizes) -> Made:
            import transformers

            kind = name.replace("_", "-") if name in ("deberta_v2", "xlm_roberta") else name
            config = transformers.AutoConfig.for_model(kind, **_sizes(sizes))
            model = getattr(transformers, f"AutoModelFor{head}").from_config(config).train()
            batch = inputs(name)
            return model, lambda model: model(**batch).loss

        _enter(name, make)


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, LENGTH))


def _own_labels(_: str) -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _masked_labels(_: str) -> dict[str, Tensor]:
    tokens = _tokens()
    seen = torch.ones_like(tokens)
    seen[1, -5:] = 0
    return {"input_ids": tokens.clone(), "attention_mask": seen, "labels": tokens.masked_fill(tokens % 3 > 0, -100)}


def _images(name: str) -> dict[str, Tensor]:
    size = 16 if name == "vit" else 32
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(CLASSES, (2,))}


def _segments(_: str) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(CLASSES, (2, 8, 8))}


_hugging("CausalLM", _own_labels)
_hugging("MaskedLM", _masked_labels)
_hugging("Seq2SeqLM", _masked_labels)
_hugging("ImageClassification", _images)
_hugging("SemanticSegmentation", _segments)
_hugging("SpeechSeq2Seq", lambda _: {"input_features": torch.randn(2, 8, 40), "labels": _tokens()})
_hugging("CTC", lambda _: {"input_values": torch.randn(2, 400), "labels": torch.randint(3, VOCABULARY, (2, 6))})


def _clip() -> Made:
    import transformers

    tiny = SIZES["sizes"]["tiny"]
    text = transformers.CLIPTextConfig(**tiny)
    vision = transformers.CLIPVisionConfig(**tiny | {"image_size": 16, "patch_size": 4})
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    model = transformers.CLIPModel(config).train()
    batch = {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, 16, 16)}
    return model, lambda model: model(**batch, return_loss=True).loss


_enter("clip", _clip)


def _monai(name: str, network: str, shape: list[int], classes: int = CLASSES, **options: Any) -> None:
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


for _name, _options in SIZES["MONAI"].items():
    _monai(_name, **_options)


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

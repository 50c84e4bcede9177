"""Planning problems as files: profiles of large training steps on large devices, taken without memory.

Each is a profile of mode ``fake``: the step of the CPU's operators, with the durations of a device's roofline
(``profiler/fake/roofline.py``, which states every rate) and the link it is usually attached by. ``pooch plan`` reads
them.

    python -m benchmarks.instances [NAME ...] [--out benchmarks/instances]

Convolutional and recurrent networks are fp32 on every device; convolutions and LSTMs take TF32 rates where the device
has them and products of matrices do not, as torch's defaults are. Transformers are fp32 on V100, and bf16 throughout
(parameters and optimizer state too) on newer devices. Durations are rounded to four digits, so that files compress.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks import networks
from benchmarks.facts import table_row
from benchmarks.pairs import profiled
from benchmarks.plans import INSTANCES as FOLDER
from poochplan.formats.profile import Phase, PointKind, Profile
from poochplan.profiler.fake.fake import building
from poochplan.units import format_bytes, format_seconds
from poochplan.workload import Workload
from poochplan.workloads import sequence, volume
from poochplan.workloads.common import require
from poochplan.workloads.hugging_face import transformer

DEVICES = ("v100", "a100", "h200")
QWEN2_7B = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
QWEN2_7B |= {"vocab_size": 152064}
VIT_L = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_labels": 1000}
WHISPER_LARGE = {"d_model": 1280, "num_mel_bins": 128}
for _side in ("encoder", "decoder"):
    WHISPER_LARGE |= {f"{_side}_attention_heads": 20, f"{_side}_ffn_dim": 5120}


class Instance(NamedTuple):
    """A network at one size, and the devices it is profiled for."""

    build: Callable[[], Workload]
    text: str
    devices: tuple[str, ...] = DEVICES
    transformer: bool = False


def classifier(model: torch.nn.Module, shape: tuple[int, ...], classes: int) -> Workload:
    """Cross entropy on random inputs, SGD with momentum."""
    inputs, labels = torch.randn(shape), torch.randint(classes, shape[:1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, lambda: torch.nn.functional.cross_entropy(model(inputs), labels), optimizer)


def gpt(layers: int, width: int, heads: int, length: int, batch: int, dropout: float) -> Workload:
    """GPT-2 with fused attention: dropout everywhere but on the attention's weights, which would unfuse it on CPU."""
    transformers = require("transformers")
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, use_cache=False,
        embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return language_model(model, config.vocab_size, batch, length)


def bert_large(length: int, batch: int) -> Workload:
    """BERT-large; dropout on the attention's weights, so that attention is not fused and its matrices are saved."""
    transformers = require("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    )
    return language_model(transformers.BertForMaskedLM(config).train(), config.vocab_size, batch, length)


def language_model(model: torch.nn.Module, vocabulary: int, batch: int, length: int) -> Workload:
    """Random tokens, each its own label; AdamW as one kernel."""
    tokens = torch.randint(vocabulary, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, lambda: model(input_ids=tokens, labels=tokens).loss, optimizer)


def today(name: str, text: str, **settings: Any) -> Instance:
    """A model of transformers in bf16 throughout, by the name of its configuration."""
    return Instance(
        lambda: transformer(name, precision="bfloat16", **settings), text, devices=("h100",), transformer=True
    )


INSTANCES = {
    "resnet50-b256": Instance(
        lambda: classifier(networks.resnet50(), (256, 3, 224, 224), 1000), "ResNet-50, 256 images of 224x224"
    ),
    "resnet50-b590": Instance(
        lambda: classifier(networks.resnet50(), (590, 3, 224, 224), 1000),
        "the same, 590 images: about the 50 GB of PoocH's evaluation",
        devices=("v100",),
    ),
    "resnext101-3d": Instance(
        lambda: classifier(networks.resnext101_3d(), (176, 3, 16, 112, 112), 400),
        "ResNeXt-101 3D, 176 clips of 16x112x112",
    ),
    "unet3d-192": Instance(
        lambda: volume.unet3d(side=192), "3D U-Net (MONAI BasicUNet, base 32, batch norm), one volume of 192x192x192"
    ),
    "gpt2-medium": Instance(
        lambda: gpt(24, 1024, 16, length=1024, batch=8, dropout=0.1),
        "GPT-2 medium, 24 layers, 8 x 1,024 tokens, fused attention",
        transformer=True,
    ),
    "seq2seq": Instance(
        lambda: sequence.seq2seq(
            batch_size=256, sequence_length=64, vocabulary=32000, width=1024, layers=4, heads=8, dropout=0.2
        ),
        "LSTM encoder and decoder (4 + 4 layers of 1,024) with attention, 256 x 64 tokens of 32,000",
    ),
    "bert-large": Instance(
        lambda: bert_large(length=512, batch=32), "BERT-large, 32 x 512 tokens, attention not fused", transformer=True
    ),
    "gpt-96": Instance(
        lambda: gpt(96, 2048, 16, length=2048, batch=4, dropout=0.1),
        "a GPT of 96 layers of 2,048 (GPT-3's depth, 5 billion parameters), 4 x 2,048 tokens",
        devices=("h200",),
        transformer=True,
    ),
    "llama-7b": today("llama", "Llama 7B, 2 x 4,096 tokens", batch_size=2, length=4096),
    "qwen2-7b": today(
        "qwen2", "Qwen2 7B, 4 key-value heads, 2 x 4,096 tokens", batch_size=2, length=4096, layers=28, **QWEN2_7B
    ),
    "vit-l": today("vit", "ViT-L, 512 images of 224x224", batch_size=512, layers=24, **VIT_L),
    "whisper-large": today(
        "whisper", "Whisper large, 32 x 30 s of speech", batch_size=32, length=448, layers=32, **WHISPER_LARGE
    ),
}


def instance_profile(name: str, device: str) -> Profile:
    """The profile of one network on one device, durations rounded."""
    return profile_of(INSTANCES[name], name, device)


def gpt_blocks(layers: int, device: str = "v100", seed: int = 0) -> Profile:
    """A step of 18 saved values a layer and 10 more, for how planning grows with them: no file holds it."""
    blocks = Instance(
        lambda: gpt(layers, 256, 4, length=256, batch=4, dropout=0.1), f"{layers} layers of 256", transformer=True
    )
    return profile_of(blocks, f"gpt-blocks-{layers}", device, seed)


def profile_of(instance: Instance, name: str, device: str, seed: int = 0) -> Profile:
    """The profile of ``instance`` on one device, durations rounded."""
    dtype = torch.bfloat16 if instance.transformer and device != "v100" else torch.float32
    torch.manual_seed(seed)
    with building(), default_dtype(dtype):
        workload = instance.build()
    return rounded(profiled(workload, name, mode="fake", roofline=device))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside are of that type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rounded(profile: Profile, digits: int = 4) -> Profile:
    """Durations to so many significant digits, and the step's as their sums."""
    replace = msgspec.structs.replace
    ops = tuple(replace(op, duration_s=float(f"{op.duration_s:.{digits}g}")) for op in profile.ops)
    sums_s = {phase: sum(op.duration_s for op in ops if op.phase is phase) for phase in Phase}
    by_phase = {f"{phase}_s": seconds for phase, seconds in sums_s.items()}
    return replace(profile, ops=ops, times=replace(profile.times, **by_phase, step_s=sum(sums_s.values())))


def row(name: str, device: str, profile: Profile, size_bytes: int) -> str:
    """What an instance is, in a line of a table."""
    saved = {profile.handles[point.handle].value for point in profile.points if point.kind is PointKind.SAVE}
    saved_bytes = sum(profile.values[value].size_bytes for value in saved)
    return table_row(
        name, device, f"{len(saved):,}", f"{len(profile.ops):,}", format_bytes(profile.in_core_peak_bytes),
        format_bytes(saved_bytes), format_seconds(profile.times.step_s), f"{size_bytes / 1e3:.0f} kB",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(INSTANCES)} (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default: benchmarks/instances)")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in INSTANCES]
    if unknown:
        parser.error(f"expected names of {', '.join(INSTANCES)}, found {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or INSTANCES:
        for device in INSTANCES[name].devices:
            profile = instance_profile(name, device)
            path = profile.save(options.out / f"{name}-{device}.json.gz", force=True)
            print(row(name, device, profile, path.stat().st_size), flush=True)


if __name__ == "__main__":
    main()

"""The ready workloads: each config gives a step that trains, the same for the same seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from poochplan.errors import UsageError
from poochplan.workload import Workload, load_workload
from poochplan.workloads import volume
from poochplan.workloads.common import require
from tests.workloads.small import SMALL, losses

CONFIGS = Path(__file__).parents[2] / "configs"
NETWORKS = [name for name in SMALL if name not in ("demo", "tiny")]  # those two are the 3D U-Net again


def build(name: str, **overrides: str) -> Workload:
    return load_workload(str(CONFIGS / f"{name}.toml"), {**SMALL[name], **overrides}).workload


def test_every_config_is_tried_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_a_step_gives_a_finite_scalar_loss_and_a_gradient_for_every_parameter(name: str) -> None:
    workload = build(name)
    assert workload.model.training
    loss = workload.step()
    assert loss.shape == ()
    assert loss.isfinite()
    assert loss.requires_grad
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    loss.backward()
    missing = [key for key, parameter in workload.model.named_parameters() if parameter.grad is None]
    assert missing == []
    workload.model.zero_grad()
    *_, last = losses(workload, 9)
    assert last < loss, "training lowers it"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(name: str) -> None:
    first, again, other = (losses(build(name, seed=seed), 3) for seed in ("1", "1", "2"))
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("name", [name for name in SMALL if name != "tiny"])
def test_a_config_at_its_own_size_gives_a_finite_loss_and_its_activations_dominate(name: str) -> None:
    workload = load_workload(str(CONFIGS / f"{name}.toml")).workload
    theirs = {tensor.untyped_storage().data_ptr() for tensor in workload.model.parameters()}
    saved: dict[StorageWeakRef, int] = {}

    def pack(tensor: torch.Tensor) -> None:
        """Nothing is held: no backward follows, and a worker's memory is for two of these networks at most."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in theirs:
            saved[StorageWeakRef(storage)] = storage.nbytes()  # its address is no other's as long as this refers to it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        loss = workload.step()
    assert loss.isfinite()
    parameter_bytes = sum(parameter.nbytes for parameter in workload.model.parameters())
    assert 100 * 2**20 < sum(saved.values()) < 1536 * 2**20
    assert sum(saved.values()) > 4 * parameter_bytes


def test_the_volume_is_two_real_acquisitions_with_the_outside_at_zero() -> None:
    volumes = volume.brain_volumes(32)
    assert volumes.shape == (2, 1, 32, 32, 32)
    assert volumes.min() == 0
    assert 0.3 < (volumes > 0).float().mean() < 0.95
    assert not torch.equal(volumes[0], volumes[1])


def test_intensity_classes_are_equally_populated_bands_of_brightness_inside_the_head() -> None:
    volumes = torch.arange(0, 28).reshape(1, 1, 1, 4, 7).float()
    classes = volume.intensity_classes(volumes, 4)
    assert classes.dtype == torch.int64
    assert classes.flatten().tolist() == [0] + [1] * 9 + [2] * 9 + [3] * 9


@pytest.mark.parametrize(
    ("name", "parameter", "value", "found"),
    [
        ("tiny", "side", "40", "expected a multiple of 16 from 32 on, found 40"),
        ("tiny", "features", "[1, 2]", "expected 6 channel counts, found 2"),
        ("tiny", "classes", "1", "expected at least 2"),
        ("tiny", "optimizer", "adam", "expected one of adamw, sgd, found 'adam'"),
        ("char_rnn", "sequence_length", "100000000", "sequence_length: expected less than the text's"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_the_reason(name: str, parameter: str, value: str, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        build(name, **{parameter: value})


def test_a_missing_library_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'poochplan\[workloads\]'"):
        require("transformers")

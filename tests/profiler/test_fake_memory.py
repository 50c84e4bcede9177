"""A step without memory counts what its ops take inside, as far as they could be run by themselves, and says so.

The same kernels on the same shapes take the same blocks, so the peak is that of the real step to the byte. What may
differ is what data decides, and what a step takes between its ops.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Memory, Op, Profile
from poochplan.profiler.fake import op_bench
from poochplan.profiler.fake.op_bench import OpBench, cache_path
from poochplan.runtime.allocator.library import why_unavailable
from tests.profiler.test_op_bench import HERE, aten, spec
from tests.profiler.test_workspace import Taking
from tests.runtime.nets import CASES, of, taken

needs_allocator = pytest.mark.skipif(bool(why_unavailable()), reason="no compiled allocator")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1))


NETS = {
    "volume": of(_volume, 1, 1, 24, 24, 24),
    "encoder": of(lambda: nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True), 4, 32, 32),
    "recurrent": CASES["recurrent"],
}


def _taken(ops: tuple[Op, ...]) -> list[object]:
    return [(op.name, op.workspace_bytes, op.blocks) for op in ops]


@needs_allocator
@pytest.mark.parametrize("name", NETS)
def test_the_peak_is_that_of_the_real_step_and_so_is_what_each_op_takes(name: str) -> None:
    real, fake = NETS[name].profile(), NETS[name].new_profile(mode="fake")
    assert fake.memory is real.memory is Memory.ALLOCATED
    assert _taken(fake.ops) == _taken(real.ops)
    assert fake.in_core_peak_bytes == real.in_core_peak_bytes
    assert fake.in_core_live_peak_bytes == real.in_core_live_peak_bytes
    assert fake.facts is not None
    assert fake.facts.unmeasured_ops == 0
    assert poochplan.plan(fake, "100%").prediction.memory is Memory.ALLOCATED


@needs_allocator
def test_the_convolutions_take_more_inside_than_all_that_lives() -> None:
    fake = NETS["volume"].new_profile(mode="fake")
    assert fake.in_core_live_peak_bytes is not None
    assert fake.in_core_peak_bytes > 2 * fake.in_core_live_peak_bytes


@needs_allocator
def test_what_ops_take_is_remembered_and_measured_anew_where_it_was_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    convolution = spec(
        aten.convolution.default, torch.empty(1, 8, 24, 24, 24), torch.empty(8, 8, 3, 3, 3), None,
        [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1,
    )  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(op_bench, "step_scope", lambda: None)
        (without,) = OpBench(HERE).costs([convolution])
    assert without.memory is None
    found = []
    for source in ("measured", "cached"):
        bench = OpBench(HERE)
        found += bench.costs([convolution])
        assert bench.counts[source] == 1
    assert found[0] == found[1]
    assert found[0].memory is not None
    assert found[0].memory.workspace_bytes > 0


def _partly_known() -> Profile:
    model, batch = Taking(), torch.randn(64, 256)
    return taken(lambda: model(batch).square().mean(), model, mode="fake")


def _said(profile: Profile) -> str:
    (note,) = (note for note in profile.notes if "take and give back inside" in note)
    assert "\n" not in note
    return note


@needs_allocator
def test_an_op_that_cannot_be_run_by_itself_is_said_to_be_unknown() -> None:
    profile = _partly_known()
    assert profile.memory is Memory.ALLOCATED
    assert "of 1 it is not known, first poochplan_tests.takes_and_gives_back.default: peaks may be" in _said(profile)
    (advice,) = (line for line in profile.advice() if "inside is not known" in line)
    assert "of 1 that could not be run by themselves" in advice
    (op,) = (op for op in profile.ops if "takes_and_gives_back" in op.name)
    assert (op.workspace_bytes, op.blocks) == (0, ())


def test_without_the_allocator_peaks_count_live_tensors_and_the_profile_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op_bench, "step_scope", lambda: None)
    profile = _partly_known()
    assert profile.memory is Memory.LIVE
    assert "peaks count live tensors alone" in _said(profile)
    assert profile.facts is not None
    assert profile.facts.unmeasured_ops == 0
    assert not any(op.workspace_bytes for op in profile.ops)


def test_with_a_roofline_peaks_count_live_tensors_and_the_profile_says_so() -> None:
    profile = CASES["attention"].profile(mode="fake", roofline="v100")
    assert profile.memory is Memory.LIVE
    assert any("nothing was run, and peaks count live tensors alone" in note for note in profile.notes)


def test_a_cost_that_was_remembered_wrongly_is_measured_anew() -> None:
    add = spec(aten.add.Tensor, torch.empty(8), torch.empty(8))
    path = cache_path(HERE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode({add.key: [1.0, ["many"]]}))
    bench = OpBench(HERE)
    bench.costs([add])
    assert bench.counts["measured"] == 1

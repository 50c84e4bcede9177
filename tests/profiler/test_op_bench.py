"""The ops of a step without memory are run one by one on this machine, for their seconds and what they take inside;
both are remembered, and the peak is that of the real step to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Device, Memory, Op, Profile
from poochplan.profiler.fake import op_bench
from poochplan.profiler.fake.op_bench import OpBench, OpSpec, Recency, cache_bytes, cache_path
from tests.online.caches import empty_cache
from tests.profiler.test_workspace import TAKING
from tests.runtime.nets import CASES, of, taken
from tests.runtime.served import needs_compiler

aten = torch.ops.aten
HERE = Device(kind="cpu", name="a test's", memory_bytes=0, threads=torch.get_num_threads())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(op_bench, "REPEATS", 1)  # no test asserts a time
    with empty_cache(tmp_path):
        yield


def counts(profile: Profile) -> list[int]:
    """Distinct ops measured, from the cache, and estimated, by the profile's note."""
    note = next(note for note in profile.notes if "run by themselves" in note)
    found = re.search(r"(\d+) measured, (\d+) cached, (\d+) estimated", note)
    return [int(number) for number in found.groups()]


def spec(func: object, *args: object, **kwargs: object) -> OpSpec:
    return OpSpec(func, args, kwargs, torch.empty(0))


def test_the_second_profile_takes_every_duration_from_the_cache() -> None:
    first, second = (CASES["residual"].new_profile(mode="fake") for _ in range(2))
    measured, cached, estimated = counts(first)
    assert measured > 20
    assert cached == 0
    assert counts(second) == [0, measured, estimated]
    assert second.device.name == CASES["residual"].profile().device.name


def test_all_but_the_seconds_is_as_with_a_roofline() -> None:
    measured = CASES["attention"].profile(mode="fake")
    roofline = CASES["attention"].profile(mode="fake", roofline="v100")
    assert measured.ops_fingerprint == roofline.ops_fingerprint
    assert measured.values == roofline.values
    assert roofline.memory is Memory.LIVE
    assert any("nothing was run, and peaks count live tensors alone" in note for note in roofline.notes)
    assert poochplan.plan(measured, budget="80%", evaluations=100).estimate


def test_an_op_with_more_work_takes_longer() -> None:
    small, large = torch.empty(16, 16), torch.empty(1024, 1024)
    short, long = OpBench(HERE).costs([spec(aten.mm.default, x, x) for x in (small, large)])
    assert short.seconds < long.seconds


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"a": "b"}', b"\xff\xfe", b'{"x": 1e999}', b'{"KEY": [1, ["many"]]}']
)
def test_a_broken_cache_is_as_good_as_none(content: bytes) -> None:
    add = spec(aten.add.Tensor, torch.empty(8), torch.empty(8))
    path = cache_path(HERE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.replace(b"KEY", add.key.encode()))
    bench = OpBench(HERE)
    bench.costs([add])
    assert bench.counts["measured"] == 1
    assert add.key in msgspec.json.decode(path.read_bytes())


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert OpBench(HERE).costs([spec(aten.relu.default, torch.empty(8))])[0].seconds > 0


def test_durations_are_kept_apart_by_thread_count_and_device() -> None:
    others = [msgspec.structs.replace(HERE, threads=HERE.threads + 1), msgspec.structs.replace(HERE, name="another")]
    assert len({cache_path(device) for device in (HERE, *others)}) == 3


def test_ops_differ_by_shapes_strides_dtypes_scalars_and_shared_storage() -> None:
    x = torch.empty(8, 8)
    keys = [
        spec(aten.add.Tensor, *arguments).key
        for arguments in [(x, x), (x, x.clone()), (x, x.t()), (x, 1.0), (x, 2.0), (x.double(),) * 2, (x[:4], 1.0)]
    ]
    assert len(set(keys)) == len(keys)
    assert spec(aten.add.Tensor, x.clone(), 1.0).key == keys[3]


def test_an_op_that_finds_its_input_in_the_cache_is_another_than_one_that_does_not() -> None:
    large, small = torch.empty(1 << 20), torch.empty(1 << 10)
    held, missing = frozenset({0}), frozenset[int]()
    keys = {cached: OpSpec(aten.relu.default, (large,), {}, large, cached).key for cached in (held, missing, None)}
    assert keys[held] == keys[None] != keys[missing]
    assert len({OpSpec(aten.relu.default, (small,), {}, small, cached).key for cached in (held, missing)}) == 1


def test_what_cannot_be_run_by_itself_is_estimated_and_never_cached() -> None:
    out_of_range = spec(aten.mm.default, torch.empty(2, 3), torch.empty(2, 3))  # fails
    bench = OpBench(HERE)
    assert bench.costs([out_of_range])[0].seconds >= 0
    assert bench.counts == {"measured": 0, "cached": 0, "estimated": 1}
    assert out_of_range.key not in msgspec.json.decode(cache_path(HERE).read_bytes())


def test_the_step_s_tensors_and_generators_are_left_alone() -> None:
    state, written = torch.get_rng_state(), torch.ones(8)
    OpBench(HERE).costs([spec(aten.add_.Tensor, written, 1.0), spec(aten.uniform_.default, written)])
    assert torch.equal(written, torch.ones(8))
    assert torch.equal(state, torch.get_rng_state())


def test_integers_that_index_are_within_range() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    tokens = torch.randint(0, 10, (4, 6))
    loss_of = nn.functional.cross_entropy
    profile = taken(lambda: loss_of(model(tokens).flatten(0, 1), tokens.flatten()), model, mode="fake")
    assert counts(profile)[2] == 0


@pytest.mark.parametrize(
    ("touched", "held"),  # values and their bytes
    [
        pytest.param([(1, 4), (2, 4), (1, 4), (3, 4)], {1, 3}, id="what was touched lately"),
        pytest.param([(1, 4), (2, 11)], set(), id="nothing behind a value larger than the cache"),
        pytest.param([(1, 4), (2, 11), (3, 10)], {3}, id="what fits after that"),
        pytest.param([(1, 6)] * 5 + [(2, 4)], {1, 2}, id="a value touched again once"),
    ],
)
def test_a_cache_of_ten_bytes_holds(touched: list[tuple[int, int]], held: set[int]) -> None:
    recency = Recency(10)
    for value, size_bytes in touched:
        recency.touch(value, size_bytes)
    assert {value for value in (1, 2, 3) if recency.holds(value)} == held


def test_a_processor_has_a_cache() -> None:
    assert cache_bytes() >= 64 << 10


def _volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1))


NETS = {
    "volume": of(_volume, 1, 1, 24, 24, 24),
    "encoder": of(lambda: nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True), 4, 32, 32),
    "recurrent": CASES["recurrent"],
}


def _taken(ops: tuple[Op, ...]) -> list[object]:
    return [(op.name, op.workspace_bytes, op.blocks) for op in ops]


@needs_compiler
@pytest.mark.parametrize("name", NETS)
def test_the_peak_is_that_of_the_real_step_and_so_is_what_each_op_takes(name: str) -> None:
    real, fake = NETS[name].profile(), NETS[name].new_profile(mode="fake")
    assert fake.memory is real.memory is Memory.ALLOCATED
    assert _taken(fake.ops) == _taken(real.ops)
    assert fake.in_core_peak_bytes == real.in_core_peak_bytes
    assert fake.in_core_live_peak_bytes == real.in_core_live_peak_bytes
    assert fake.facts.unmeasured_ops == 0
    assert poochplan.plan(fake, "100%").prediction.memory is Memory.ALLOCATED


@needs_compiler
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
    assert found[0].memory.workspace_bytes > 0


def _said(profile: Profile) -> str:
    (note,) = (note for note in profile.notes if "take and give back inside" in note)
    assert "\n" not in note
    return note


@needs_compiler
def test_an_op_that_cannot_be_run_by_itself_is_said_to_be_unknown() -> None:
    profile = TAKING.new_profile(mode="fake")
    assert profile.memory is Memory.ALLOCATED
    assert "that of 1 is not known, first poochplan_tests.takes_and_gives_back.default: peaks may be" in _said(profile)
    (advice,) = (line for line in profile.advice() if "inside is not known" in line)
    assert "for 1 that could not be run by themselves" in advice
    (op,) = (op for op in profile.ops if "takes_and_gives_back" in op.name)
    assert (op.workspace_bytes, op.blocks) == (0, ())


def test_without_the_allocator_peaks_count_live_tensors_and_the_profile_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op_bench, "step_scope", lambda: None)
    profile = TAKING.new_profile(mode="fake")
    assert profile.memory is Memory.LIVE
    assert "peaks count live tensors alone" in _said(profile)
    assert profile.facts.unmeasured_ops == 0
    assert not any(op.workspace_bytes for op in profile.ops)

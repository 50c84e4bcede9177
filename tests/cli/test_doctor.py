"""``pooch doctor``: each line says what was found, how it stands and what to do."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan import doctor
from poochplan.doctor import Finding, Status, spill_disk, torch_version, workload_findings
from poochplan.runtime.arena.library import compiler_name
from tests.cli.conftest import Pooch
from tests.runtime.nets import Net

OK, WARNING, MISSING, _ = Status
ROOT = Path(__file__).parents[2]


def only(**there: str) -> Any:
    """The versions of these packages, and of no other."""
    return {name.replace("_", "-"): version for name, version in there.items()}.get


def test_every_line_is_ok_or_says_what_to_do(pooch: Pooch) -> None:
    result = pooch.ok("doctor", pooch.small)
    assert result.err == ""
    machine = "threads", "huge pages", "spill disk", "noise"
    for name in ("torch", "CuPy", "solvers", "evaluator", "allocator", *machine, "model", "under a mode"):
        assert re.search(rf"^(ok|warning|missing) +{name} +\S", result.out, re.MULTILINE), name
    data = pooch.json("doctor")
    assert sum(data["counts"].values()) == len(data["findings"])
    assert all(one["advice"] for one in data["findings"] if one["status"] != "ok")
    assert "model" not in {one["name"] for one in data["findings"]}


def test_a_disk_to_spill_to_is_left_as_it_was_and_without_one_it_ends_with_code_1(pooch: Pooch, tmp_path: Path) -> None:
    result = pooch("doctor --spill-dir", tmp_path / "nowhere")
    assert result.code == 1
    assert re.search(r"^missing +spill disk +spill directory", result.out, re.MULTILINE)
    found = spill_disk(tmp_path)
    assert found.status in (OK, WARNING) or "tmpfs" in found.found
    assert "both at once: each keeps" in found.found or "tmpfs" in found.found
    assert list(tmp_path.iterdir()) == []


NOISY, EVEN = [0.005, 0.0051, 0.0052, 0.02], [0.005, 0.0051, 0.0052, 0.0051]
OTHER = {"cupy_cuda12x": "13.6"}
FINDINGS = [
    (doctor.threads(2, 2), OK, ""),
    (doctor.threads(8, 2), WARNING, "OMP_NUM_THREADS=2"),
    (doctor.noise(EVEN), OK, ""),
    (doctor.noise(NOISY), WARNING, ""),
    (doctor.huge_pages("[always] madvise never"), OK, ""),
    (doctor.huge_pages("always [madvise] never"), OK, ""),
    (doctor.huge_pages("always madvise [never]"), WARNING, "echo madvise | sudo tee"),
    (doctor.huge_pages(""), WARNING, "echo madvise | sudo tee"),
    (torch_version("2.99.0"), WARNING, ""),
    (torch_version("2.1.0"), WARNING, ""),
    (doctor.cupy(None, only()), OK, ""),
    (doctor.cupy("12.8", only(**OTHER)), OK, ""),
    (doctor.cupy("13.0", only()), WARNING, "pip install 'poochplan[cuda13]'"),
    (doctor.cupy("13.0", only(**OTHER)), WARNING, "pip uninstall cupy-cuda12x; pip install 'poochplan[cuda13]'"),
    (doctor.solvers(only(pulp="3.3", highspy="1.10")), OK, ""),
    (doctor.solvers(only(pulp="3.3")), WARNING, "pip install highspy"),
    (doctor.solvers(only()), MISSING, ""),
    (doctor.disk_rate([]), OK, ""),
    (doctor.disk_rate(["8:0 rbps=max wbps=1048576 (io.max)"]), WARNING, "as throttle"),
    (doctor.caches(Path("/dev/null/none")), WARNING, "set XDG_CACHE_HOME to another folder"),
    (doctor.memory(1 << 30, 2 << 30), OK, ""),
    (doctor.memory(2 << 30, 1 << 30), WARNING, "--mode swap-all"),
    (doctor.memory(None, 1), OK, ""),
]


@pytest.mark.parametrize(("found", "status", "advice"), FINDINGS, ids=lambda one: getattr(one, "found", "") or str(one))
def test_a_check_says_how_things_stand_and_what_to_do(found: Finding, status: Status, advice: str) -> None:
    assert found.status is status
    assert advice in found.advice


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs")
def test_a_tmpfs_is_no_spill_disk() -> None:
    found = spill_disk("/dev/shm")
    assert found.status is MISSING
    assert "is a tmpfs: spilling to memory saves none" in found.found


def test_the_tested_torches_begin_with_the_oldest_allowed_and_have_the_one_that_is_pinned() -> None:
    assert f'"torch>={doctor.TESTED_TORCH[0]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = [line.removeprefix("torch==") for line in pins if line.startswith("torch==")]
    assert torch_version(f"{pinned}+cpu").status is OK


PARTS = "evaluator", "allocator", "tape"
"""What is compiled on its first use."""


def fails(folder: Path) -> str:
    compiler = folder / "compiler"
    compiler.write_text("#!/bin/sh\necho 'source.cpp:1:1: error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    return str(compiler)


def findings_under(pooch: Pooch, command: str) -> dict[str, Any]:
    """By name, what it printed of the parts that are compiled on their first use."""
    found = {one["name"]: one for one in pooch(command).data["findings"]}
    return {name: (found[name]["status"], found[name]["found"]) for name in PARTS}


def test_what_is_compiled_is_a_line_that_builds_nothing_unless_asked(
    pooch: Pooch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler := fails(tmp_path))
    for status, said in findings_under(pooch, "doctor --json").values():
        assert status == "ok"
        assert said.startswith(f"not built yet; {compiler} will do it on first use")
    assert not (tmp_path / "cache" / "poochplan" / "native").exists()
    assert pooch("doctor --build").code == 1
    said = {part: f"{compiler} could not build the {part}: source.cpp:1:1: error: no such header" for part in PARTS}
    assert findings_under(pooch, "doctor --json") == {part: ("warning", line) for part, line in said.items()}
    assert findings_under(pooch, "doctor --build --json") == {part: ("missing", said[part]) for part in PARTS}
    monkeypatch.setenv("CXX", f"{compiler} -O1")  # what another compiler could do is not known
    assert {status for status, _ in findings_under(pooch, "doctor --json").values()} == {"ok"}


def test_without_a_compiler_what_is_compiled_says_what_to_install(
    pooch: Pooch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = " ".join(pooch.ok("doctor").out.split())
    for part in PARTS:
        assert f"warning {part} expected a C++ compiler, found none of c++, g++, clang++ -> install g++" in found


@pytest.mark.skipif(not compiler_name(), reason="there is no compiler")
def test_the_doctor_builds_what_is_compiled_when_asked(
    pooch: Pooch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = pooch("doctor --build").out
    assert re.search(r"^ok +allocator +built: torch", said, re.MULTILINE)
    assert re.search(r"^ok +evaluator +built: evaluator", said, re.MULTILINE)
    assert re.search(r"^ok +tape +built: torch", said, re.MULTILINE)
    assert sorted(file.name for file in tmp_path.rglob("*.so")) == ["allocator.so", "evaluator.so", "tape.so"]


# -- workloads -----------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Two blocks, checkpointed or not."""

    def __init__(self, is_checkpointed: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.is_checkpointed, self.reentrant = is_checkpointed, reentrant

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = checkpoint(block, batch, use_reentrant=self.reentrant) if self.is_checkpointed else block(batch)
        return batch


def findings_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Finding]:
    batch = torch.randn(4, 8, requires_grad=True)
    workload = poochplan.Workload(model, lambda: model(batch).square().mean(), optimizer)
    return {one.name: one for one in workload_findings(workload)}


def test_activation_checkpointing_and_operators_that_compute_otherwise_under_a_mode_are_seen_in_the_step() -> None:
    for reentrant in (False, True):
        on = findings_of(Blocks(True, reentrant))["activation checkpointing"]
        assert (on.status, "switch it off" in on.advice) == (WARNING, True)
        assert on.found == "on, in blocks.1 and 1 more"
    model = Net(lambda its, batch: its.layer(batch).sigmoid().prod(dim=1), layer=nn.Linear(8, 8))
    assert findings_of(model)["under a mode"].found.startswith("autograd.ProdBackward1: torch uses another formula")


def test_a_model_that_rests_and_an_optimizer_that_is_missing_or_lbfgs_are_warnings() -> None:
    model = Blocks(False)
    before, optimizer = copy.deepcopy(model.state_dict()), torch.optim.AdamW(model.parameters())
    assert {one.status for one in findings_of(model, optimizer).values()} == {OK}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it is as it was"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    model.blocks[0].eval()
    assert "call model.train()" in findings_of(model)["train mode"].advice
    assert "return it in the Workload" in findings_of(model)["optimizer"].advice
    assert findings_of(model, torch.optim.LBFGS(model.parameters()))["optimizer"].status is WARNING


def test_a_compiled_model_is_told_to_be_compiled_by_blocks() -> None:
    model = Blocks(False)
    model.blocks[0].compile(backend="eager")
    assert findings_of(model)["compiled parts"].status is OK
    assert "first blocks.0" in findings_of(model)["compiled parts"].found
    model.compile(backend="eager")
    whole = findings_of(model)["compiled parts"]
    assert (whole.status, "compile its blocks instead" in whole.advice) == (WARNING, True)
    assert "have poochplan.compile compile it with a plan inside (pooch run --compile)" in whole.advice

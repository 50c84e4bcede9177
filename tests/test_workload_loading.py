"""Naming a workload: every way to write one is understood, and every mistake gets one line that says what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from poochplan.errors import PoochError, UsageError
from poochplan.workload import Workload, load_workload, parse_override, read_workload_file, shipped_configs

USER_CODE = """
from collections.abc import Sequence
import torch
from poochplan import Workload
import helper_beside_it

CALLS = []
LIMIT = 3

def linear(*, width: int = 4, lr: float = 0.1, label: str = "none", sizes: Sequence[int] = (1, 2), fast: bool = False):
    CALLS.append(dict(width=width, lr=lr, label=label, sizes=sizes, fast=fast))
    model = torch.nn.Linear(width, 1)
    return Workload(model, lambda: model(torch.ones(1, width)).sum(), torch.optim.SGD(model.parameters(), lr=lr))

def needs_depth(*, depth: int):
    return linear()

def anything(**parameters):
    return linear(width=parameters["width"])

def on_a_device(*, device: str = "cpu"):
    workload = linear()
    workload.model.to(device)
    return workload

def returns_a_model():
    return torch.nn.Linear(1, 1)

def returns_nothing():
    pass

def no_model():
    return Workload("a model", lambda: None)

def no_step():
    return Workload(torch.nn.Linear(1, 1), 3)

def no_optimizer():
    return Workload(torch.nn.Linear(1, 1), lambda: None, "sgd")

def fails():
    raise ValueError("first line\\nsecond line")

def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with code and a TOML; it is the current folder."""
    (tmp_path / "training.py").write_text(USER_CODE)
    (tmp_path / "helper_beside_it.py").write_text("")
    (tmp_path / "linear.toml").write_text('workload = "training.py:linear"\n[parameters]\nwidth = 8\nlr = 1\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def usage_error(target: str, **overrides: str) -> str:
    """The message of the UsageError, which is one line and ends the command with 2."""
    with pytest.raises(UsageError) as caught:
        load_workload(target, overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_toml_names_a_file_relative_to_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    loaded = load_workload(f"{folder.name}/linear.toml")
    assert loaded.name == "linear"
    assert isinstance(loaded.workload, Workload)
    assert loaded.parameters == {"width": 8, "lr": 1.0}
    assert loaded.workload.step().requires_grad


@pytest.mark.parametrize("target", ["training.py:linear", "./training.py:linear", "training:linear"])
def test_a_file_or_a_module_of_the_current_folder_names_a_function(folder: Path, target: str) -> None:
    loaded = load_workload(target)
    assert (loaded.name, loaded.parameters) == ("linear", {})


def test_an_absolute_path_names_a_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert load_workload(f"{folder}/training.py:linear").name == "linear"


def test_overrides_win_over_the_toml_and_have_the_types_of_the_parameters(folder: Path) -> None:
    loaded = load_workload("linear.toml", {"width": "16", "fast": "true", "sizes": "[3, 4]", "label": "64"})
    assert loaded.parameters == {"width": 16, "lr": 1.0, "fast": True, "sizes": [3, 4], "label": "64"}
    assert load_workload("training.py:anything", {"width": "2", "other": "x"}).parameters == {"width": 2, "other": "x"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("1e-3", 1e-3),
        ("true", True),
        ('"quoted"', "quoted"),
        ("plain text", "plain text"),
        ("[1, 2]", [1, 2]),
        ("2024-01-01", "2024-01-01"),
        ("1\nother = 2", "1\nother = 2"),
        ("", ""),
    ],
)
def test_an_override_is_read_as_toml_and_otherwise_as_text(text: str, value: object) -> None:
    parsed = parse_override(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("target", "overrides", "parts"),
    [
        ("linear.toml", {"widht": "3"}, ["'widht'", "did you mean width?", "it takes width, lr"]),
        ("linear.toml", {"width": "wide"}, ["linear.toml", "'width'", "expected int", "'wide' of type str"]),
        ("linear.toml", {"width": "2.5"}, ["expected int", "2.5 of type float"]),
        ("linear.toml", {"fast": "1"}, ["expected bool", "1 of type int"]),
        ("linear.toml", {"sizes": '[1, "x"]'}, ["'sizes'", "expected Sequence[int]", "$[1]"]),
        ("training.py:needs_depth", {}, ["missing parameter 'depth'", "--set depth=VALUE"]),
        ("training.py:returns_nothing", {"x": "1"}, ["unknown parameter 'x'", "it takes none"]),
    ],
)
def test_parameters_are_checked_against_the_signature(
    folder: Path, target: str, overrides: dict[str, str], parts: list[str]
) -> None:
    message = usage_error(target, **overrides)
    assert all(part in message for part in parts), message


def test_a_config_that_ships_is_found_by_its_name_alone_from_anywhere(folder: Path) -> None:
    by_name = load_workload("char_rnn", {"width": "8"})
    by_path = load_workload(str(shipped_configs()["char_rnn"]), {"width": "8"})
    assert by_name.name == by_path.name == "char_rnn"
    assert by_name.parameters == by_path.parameters
    assert shipped_configs().keys() == {path.stem for path in (Path(__file__).parents[1] / "configs").glob("*.toml")}
    targets = [read_workload_file(path).workload for path in shipped_configs().values()]
    assert all(target.startswith("poochplan.workloads.") for target in targets)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("lineer.toml", ["lineer.toml: no such workload file", "did you mean linear.toml?"]),
        ("nowhere/linear.toml", ["nowhere/linear.toml: no such workload file"]),
        ("trainin.py:linear", ["trainin.py: no such python file", "did you mean training.py?"]),
        ("training.py:liner", ["no function 'liner'", "did you mean linear?", "functions there: linear, needs_depth"]),
        ("training.py:LIMIT", ["'LIMIT' is of type int", "expected a function"]),
        ("training.py", ["name its function: training.py:function"]),
        ("missing.py", ["there is no such file"]),
        ("training.py:", ["name its function"]),
        ("linear", ["expected a TOML file, package.module:function, path/to/file.py:function or hf:NAME"]),
        ("unet3", ["found 'unet3'; the names that ship are bert, ", "did you mean unet3d?"]),
        ("configs/unet3d.toml", ["configs/unet3d.toml: no such workload file; ", "unet3d is one that ships"]),
        ("", ["name one"]),
        ("no_such_package:main", ["no module named 'no_such_package'", "install it"]),
        ("helper_beside_it:main", ["no function 'main'", "it defines no functions"]),
        ("poochplan.workloads.visoin:resnet50", ["did you mean poochplan.workloads.vision?"]),
        ("not a module:main", ["found the module name 'not a module'"]),
        ("training.py:returns_a_model", ["expected a poochplan.Workload", "found torch.nn.modules.linear.Linear"]),
        ("training.py:returns_nothing", ["expected a poochplan.Workload, found None", "return poochplan.Workload("]),
        ("training.py:no_model", ["Workload.model: expected a torch.nn.Module, found str"]),
        ("training.py:no_step", ["Workload.step", "found int"]),
        ("training.py:no_optimizer", ["Workload.optimizer: expected a torch.optim.Optimizer or None, found str"]),
    ],
)
def test_what_is_no_workload_is_named_with_what_was_likely_meant_or_found(
    folder: Path, target: str, parts: list[str]
) -> None:
    message = usage_error(target)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_library", ["exists, but an import inside it failed", "No module named 'no_such_library'"]),
        ("from json import no_such_name", ["an import inside it failed: ImportError"]),
        ("x = 1\ndef f(:\n", ["broken.py: line 2 is not valid python"]),
    ],
)
def test_a_failing_import_and_a_wrong_line_are_told_from_a_missing_module(
    folder: Path, code: str, said: list[str]
) -> None:
    (folder / "broken.py").write_text(code)
    assert [part for part in said if part not in usage_error("broken.py:main")] == []
    if "library" in code:
        assert [part for part in said if part not in usage_error("broken:main")] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('workload = "a:b"\n[parameters\n', ["not valid TOML", "line 2"]),
        ('workload = "a:b"\n[parameter]\nx = 1\n', ["unknown key 'parameter'", "did you mean parameters?"]),
        ('workload = "a:b"\nbatch_size = 1\n', ["unknown key 'batch_size'", "belong under [parameters]"]),
        ("[parameters]\n", ["missing required field `workload`", 'workload = "package.module:function"']),
        ("workload = 3\n", ["Expected `str`, got `int`", "$.workload"]),
        ('workload = "a:b"\nparameters = 3\n', ["Expected `object`, got `int`", "$.parameters"]),
        ('workload = "training.py:liner"\n', ["broken.toml: ", "did you mean linear?"]),
        ('workload = "linear.toml"\n', ["broken.toml: ", "package.module:function"]),
    ],
)
def test_an_invalid_toml_is_named_with_the_place_and_the_remedy(folder: Path, text: str, parts: list[str]) -> None:
    (folder / "broken.toml").write_text(text)
    message = usage_error("broken.toml")
    assert "broken.toml" in message
    assert all(part in message for part in parts), message


def test_a_file_that_is_not_text_is_no_workload(folder: Path) -> None:
    (folder / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml: cannot be read as a workload TOML" in usage_error("binary.toml")


@pytest.mark.parametrize(
    ("function", "found"), [("fails", "ValueError: first line second line"), ("leaves", "SystemExit: 0")]
)
def test_an_error_in_the_users_function_is_one_line_and_keeps_its_cause(
    folder: Path, function: str, found: str
) -> None:
    with pytest.raises(PoochError) as caught:
        load_workload(f"training.py:{function}")
    assert caught.value.exit_code == 1
    assert str(caught.value) == f"training.py:{function} raised {found}; pass -v to see where"
    assert type(caught.value.__cause__).__name__ in found


def test_an_error_while_the_users_module_is_imported_keeps_its_cause(folder: Path) -> None:
    (folder / "broken_run.py").write_text("1 / 0\n")
    with pytest.raises(PoochError, match="while it was imported") as caught:
        load_workload("broken_run.py:main")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_file_is_read_afresh_each_time(folder: Path) -> None:
    load_workload("training.py:linear")
    (folder / "training.py").write_text(USER_CODE.replace("width: int = 4", "width: int = 5"))
    assert load_workload("training.py:linear").workload.model.in_features == 5


def test_a_device_goes_to_the_parameter_of_that_name_or_the_message_says_how(folder: Path) -> None:
    loaded = load_workload("training.py:on_a_device", device="meta")
    assert loaded.parameters == {"device": "meta"}
    assert next(loaded.workload.model.parameters()).device.type == "meta"
    assert load_workload("training.py:on_a_device", {"device": "cpu"}, "cpu").parameters == {"device": "cpu"}

    with pytest.raises(UsageError, match="expected its model on meta, found it on cpu; give the function a parameter"):
        load_workload("training.py:linear", device="meta")

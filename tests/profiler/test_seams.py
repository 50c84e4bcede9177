"""The profiler drives the runtime's engine by what everybody has: step policies, choosers and how replays are run."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import poochplan.profiler
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.mechanism import Mechanism

MODULES = [module.name for module in pkgutil.walk_packages(poochplan.profiler.__path__, "poochplan.profiler.")]


@pytest.mark.parametrize("kind", [Engine, Mechanism])
def test_nobody_in_the_package_inherits_from(kind: type) -> None:
    for name in MODULES:
        importlib.import_module(name)
    assert [one for one in kind.__subclasses__() if one.__module__.startswith("poochplan.")] == []


@pytest.mark.parametrize("name", MODULES)
def test_no_private_attribute_of_another_object_is_touched_in(name: str) -> None:
    path = importlib.import_module(name).__file__
    touched = [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert touched == []

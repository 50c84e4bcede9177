"""Every message of a session is on docs/messages.md: its first fixed words begin a row there.

The messages are found in the code: whatever is given to ``say``, ``warn`` and the like, followed through constants,
functions that compose texts, and variables of the same function.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import poochplan
from poochplan.runtime.step_policies import step_policy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "messages.md").read_text()
ROWS = [found.replace(r"\|", "|") for found in re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)]
SAYS = {"say": 0, "warn": 0, "_fell_back": 1}
"""What says a message, and which of its arguments that is."""
DIALECT = re.compile(r"\b(kind|kinds|segment|segments|served|beside the step)\b")
WORDS = 8
LEAST_WORDS = 4
"""So many fixed words of a message are compared. A row may end after the least of them, in an ellipsis."""
GAP = "\0"
"""Stands in a text for what is known only when it is said."""
MODULES = [
    "runtime",
    "online",
    "integrations",
    "sessions",
    "plan_sets",
]
"""What runs in a session, or opens one."""
ADVICE = ("what_changed", "_of_inputs", "_of_parameters", "_of_place")
"""Functions that say what has changed in a step that diverges: amid its message, and in rows of their own."""


class Place(NamedTuple):
    """Where an expression is: its module, and the functions around it, from the outermost."""

    module: ModuleType
    around: tuple[ast.FunctionDef, ...]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The code of each module in which messages are said or composed, by name."""
    home = Path(poochplan.__file__).parent
    files = [home / f"{name}.py" for name in MODULES if (home / f"{name}.py").is_file()]
    files += [one for name in MODULES if (home / name).is_dir() for one in sorted((home / name).rglob("*.py"))]
    names = [".".join(("poochplan", *one.relative_to(home).with_suffix("").parts)) for one in files]
    return {
        name.removesuffix(".__init__"): ast.parse(one.read_text())
        for name, one in zip(names, files, strict=True)
        if "onnx" not in name
    }


@functools.cache
def functions() -> dict[str, list[tuple[Place, ast.FunctionDef]]]:
    """Functions and methods by name."""
    found: dict[str, list[tuple[Place, ast.FunctionDef]]] = {}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                place = Place(importlib.import_module(name), (node,))
                found.setdefault(node.name, []).append((place, node))
    return found


def said() -> Iterator[tuple[Place, ast.expr]]:
    """Each expression that is given to what says it."""

    def walk(node: ast.AST, place: Place) -> Iterator[tuple[Place, ast.expr]]:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            at = SAYS.get(name)
            if at is not None and len(node.args) > at:
                yield place, node.args[at]
        if isinstance(node, ast.FunctionDef):
            place = place._replace(around=(*place.around, node))
        if isinstance(node, ast.Return) and node.value is not None and place.around[-1].name in ADVICE:
            yield place, node.value
        for child in ast.iter_child_nodes(node):
            yield from walk(child, place)

    for name, tree in modules().items():
        yield from walk(tree, Place(importlib.import_module(name), ()))


def texts(node: ast.expr, place: Place, depth: int = 0) -> Iterator[str]:
    """All that the expression may be, with a gap for each part that is not known."""
    if depth > 12:
        yield GAP
    elif isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        yield from _joined(node.values, place, depth)
    elif isinstance(node, ast.FormattedValue):
        yield from [GAP] if node.format_spec is not None else texts(node.value, place, depth + 1)
    elif isinstance(node, ast.IfExp):
        yield from (*texts(node.body, place, depth + 1), *texts(node.orelse, place, depth + 1))
    elif isinstance(node, ast.Call):
        yield from _called(node, place, depth)
    elif isinstance(node, (ast.Name, ast.Attribute)):
        yield from _named(node, place, depth)
    else:
        yield GAP


def _joined(parts: list[ast.expr], place: Place, depth: int) -> Iterator[str]:
    heads = [""]
    for part in parts:
        heads = [head + text for head in heads for text in dict.fromkeys(texts(part, place, depth + 1))][:64]
    yield from heads


def _called(node: ast.Call, place: Place, depth: int) -> Iterator[str]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name == "format" and isinstance(node.func, ast.Attribute):
        for text in texts(node.func.value, place, depth + 1):
            yield re.sub(r"\{\w*\}", GAP, text)
        return
    known = functions().get(name, [])
    owner = getattr(getattr(node.func, "value", None), "attr", "").strip("_")
    known = [one for one in known if owner and owner in one[0].module.__name__.rpartition(".")[2]] or known
    results = [
        (where, part.value)
        for where, function in known
        for part in ast.walk(function)
        if isinstance(part, (ast.Return, ast.Yield)) and part.value is not None
    ]
    if not results or len(known) > 4:
        yield GAP
    for where, result in results:
        yield from texts(result, where, depth + 1)


def _named(node: ast.Name | ast.Attribute, place: Place, depth: int) -> Iterator[str]:
    value = _global(node, place.module)
    if isinstance(value, str) and (node.id if isinstance(node, ast.Name) else node.attr).isupper():
        yield value
        return
    found = [one for function in place.around for one in _assigned(node, function)] if value is None else []
    if not found:
        yield GAP
    for one in found:
        yield from texts(one, place, depth + 1)


def _global(node: ast.expr, module: ModuleType) -> object:
    if isinstance(node, ast.Name):
        return getattr(module, node.id, None)
    if isinstance(node, ast.Attribute):
        return getattr(_global(node.value, module), node.attr, None)
    return None


def _assigned(node: ast.Name | ast.Attribute, function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What the function assigns to that name, or loops over by it."""
    if not isinstance(node, ast.Name):
        return
    for one in ast.walk(function):
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        value = getattr(one, "iter", None) if isinstance(one, ast.For) else getattr(one, "value", None)
        if value is not None and any(isinstance(to, ast.Name) and to.id == node.id for to in targets):
            yield value


@functools.cache
def messages() -> dict[str, list[str]]:
    """Each message with its gaps, without the prefix of every one; by the module in which it is said."""
    found: dict[str, list[str]] = {}
    for place, node in said():
        every = [text.removeprefix("poochplan: ").replace(f" ({GAP})", GAP) for text in texts(node, place)]
        found.setdefault(place.module.__name__, []).extend(text for text in every if text.strip(GAP + " ;:,.()"))
    return {name: list(dict.fromkeys(every)) for name, every in found.items()}


def is_on_the_page(message: str) -> bool:
    return any(_begins(message, row) for row in ROWS)


def _begins(message: str, row: str) -> bool:
    """Whether the row begins as the message does. Behind its least words it may end, in an ellipsis."""
    pieces, fixed = "", 0
    for word in re.findall(rf"{GAP}|[^\s{GAP}]+|\s+", message):
        pieces += ".*?" if word == GAP else re.escape(word)
        fixed += not (word == GAP or word.isspace())
        if fixed >= LEAST_WORDS and row.endswith("...") and re.fullmatch(rf"{pieces}\W*", row):
            return True
        if fixed == WORDS:
            break
    return re.match(pieces, row) is not None


@functools.cache
def every_message() -> list[str]:
    """Of all modules, and of a step that diverges, whose message an exception composes."""
    composed = [f"{words} {GAP}" for words in step_policy._SAID.values()]
    return sorted({*composed, *(message for every in messages().values() for message in every)})


def test_messages_are_found_wherever_sessions_say_some() -> None:
    rooms = {name.split(".")[1] for name, every in messages().items() if every}
    assert rooms >= {"runtime", "online", "sessions"}
    assert len(every_message()) > 60


def test_each_message_begins_a_row_of_the_page() -> None:
    assert [message.replace(GAP, "...") for message in every_message() if not is_on_the_page(message)] == []


def test_no_message_has_words_of_the_code() -> None:
    assert [message for message in every_message() if DIALECT.search(message)] == []


@pytest.mark.parametrize("message", ["steps run backwards", f"{GAP} in front of what nobody says"])
def test_what_is_never_said_is_on_no_row(message: str) -> None:
    assert not is_on_the_page(message)

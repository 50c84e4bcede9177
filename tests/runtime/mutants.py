"""Mutants of the runtime: the same method without one of its waits, or with one of its releases moved or gone.

Found in the source itself, so that a wait or a release that is written tomorrow has its mutants too.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import pytest

WAITS = ("wait", "arrived")
"""Calls of these names wait."""
CUDA_WAITS = ("wait", "wait_event", "wait_stream", "record_stream", "synchronize")
"""The same, of CUDA's own streams; ``record_stream`` has the allocator wait."""
GIVE_BACK = ("free", "trim", "forget_ahead", "cudaHostUnregister")
"""Calls of these names give host memory back."""
HELD = ("storage", "recipe")
"""Attributes that hold memory; ``= None`` lets it go. (A copy that was waited for holds none.)"""
HELD_ON_THE_HOST = ("_owner",)


@dataclass(frozen=True)
class Mutant:
    """``what`` was done in ``where``; ``tree`` is the function's new source."""

    owner: Any
    name: str
    what: str
    line: int
    tree: ast.Module

    @property
    def label(self) -> str:
        holder = getattr(self.owner, "__qualname__", self.owner.__name__.rsplit(".", 1)[-1])
        return f"{holder}.{self.name}: {self.what} (line {self.line} of it)"

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The mutant stands in for the original within the block, also where other modules have imported it."""
        original = self.owner.__dict__[self.name]
        space: dict[str, Any] = {}
        names = inspect.unwrap(original).__globals__
        exec(compile(self.tree, f"<mutant {self.label}>", "exec"), names, space)
        places = [self.owner] if isinstance(self.owner, type) else _importers(original)
        for place in places:
            setattr(place, self.name, space[self.name])
        try:
            yield
        finally:
            for place in places:
                setattr(place, self.name, original)


def rewritten(owner: Any, name: str, old: str, new: str) -> Mutant:
    """The function with ``new`` in the place of the one ``old`` in its source."""
    source = textwrap.dedent(inspect.getsource(owner.__dict__[name]))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
    line = source[: source.index(old)].count("\n") + 1
    return Mutant(owner, name, f"{old!r} is {new!r}", line, ast.parse(source.replace(old, new)))


def assert_needed(mutant: Mutant, test: Callable[[], object]) -> None:
    """The test passes, and fails with the mutant by what it asserts: another exception would say that it cannot run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        test()
        with mutant.in_place(), pytest.raises((AssertionError, pytest.fail.Exception)):
            test()


def mutants_of(*modules: ModuleType, calls: tuple[str, ...] = WAITS) -> list[Mutant]:
    """Every wait (call of one of these names) without it, every release before the function's first wait, and every
    release without it.
    """
    found = []
    for module in modules:
        for owner, name, function in _functions(module):
            source = textwrap.dedent(inspect.getsource(function))
            for change, what in _changes(ast.parse(source), calls):
                tree = ast.parse(source)
                line = change(tree)
                found.append(Mutant(owner, name, what, line, ast.fix_missing_locations(_undecorated(tree))))
    return found


def _functions(module: ModuleType) -> Iterator[tuple[Any, str, FunctionType]]:
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        if isinstance(thing, FunctionType):
            yield module, name, thing
        elif isinstance(thing, type):
            for inner, method in vars(thing).items():
                if isinstance(method, FunctionType) and _is_written_in(module, method):
                    yield thing, inner, method


def _is_written_in(module: ModuleType, function: FunctionType) -> bool:
    """Not inherited, and not made by ``dataclass``."""
    return inspect.unwrap(function).__code__.co_filename == module.__file__


Change = Callable[[ast.Module], int]


def _changes(tree: ast.Module, calls: tuple[str, ...]) -> Iterator[tuple[Change, str]]:
    waits = [node for node in ast.walk(tree) if _is_call(node, calls)]
    for index, wait in enumerate(waits):
        what = "no wait" if wait.func.attr in WAITS else f"no {wait.func.attr}"
        yield (lambda other, index=index: _without_call(other, index, calls)), what
    releases = [node for node in ast.walk(tree) if _is_release(node)]
    for index in range(len(releases)):
        yield (lambda other, index=index: _without_release(other, index)), "nothing let go"
        if waits and _held_by(releases[index]) in HELD:
            yield (lambda other, index=index: _release_first(other, index)), "let go before the wait"


def _is_call(node: ast.AST, names: tuple[str, ...] = WAITS) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def _is_release(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and _held_by(node) in (*HELD, *HELD_ON_THE_HOST)
    )


def _held_by(node: ast.AST) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return target.attr if isinstance(target, ast.Attribute) else ""


def _without_call(tree: ast.Module, index: int, names: tuple[str, ...]) -> int:
    node = [node for node in ast.walk(tree) if _is_call(node, names)][index]
    # ``float()`` is 0.0: as if nothing had to be waited for.
    node.func, node.args = ast.Name("float", ast.Load()), []
    return node.lineno


def _without_release(tree: ast.Module, index: int) -> int:
    node = [node for node in ast.walk(tree) if _is_release(node)][index]
    line = node.lineno
    node.targets = [ast.Name("_", ast.Store())]
    return line


def _release_first(tree: ast.Module, index: int) -> int:
    node = [node for node in ast.walk(tree) if _is_release(node)][index]
    function = tree.body[0]
    early = ast.parse(ast.unparse(node)).body[0]
    # After what the function refuses to do at all: its first statement, when that is a guard.
    guards = next((i for i, statement in enumerate(function.body) if not _is_guard(statement)), 0)
    function.body.insert(guards, early)
    return node.lineno


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.If, ast.Expr)) and not any(_is_call(node) for node in ast.walk(statement))


def _undecorated(tree: ast.Module) -> ast.Module:
    function = tree.body[0]
    assert all(ast.unparse(decorator) == "contextlib.contextmanager" for decorator in function.decorator_list)
    return tree


def _importers(original: FunctionType) -> list[Any]:
    import sys

    return [
        module
        for name, module in sys.modules.copy().items()
        if name.startswith("poochplan") and vars(module).get(original.__name__) is original
    ]

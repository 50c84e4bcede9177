"""Mutations of a JSON file by field: each field of it, one at a time, has a value that nobody meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

_MARK = "@@"
DEEP = "[" * 200_000 + "]" * 200_000
LONG = 20_000
Path = tuple[str | int, ...]


class Raw(str):
    """Text of the file itself, such as numbers that Python would not write."""

    __slots__ = ()


class Mutation(NamedTuple):
    """A file with one field changed."""

    path: Path
    name: str
    text: bytes

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.name}"


_NUMBERS: dict[str, Any] = {
    "negative": -5,
    "zero": 0,
    "1 << 62": 1 << 62,
    "1 << 64": 1 << 64,
    "a milliard": 10**9,
    "a large float": 1e308,
    "a tiny float": 1e-300,
    "NaN": Raw("NaN"),
    "infinite": Raw("1e999"),
    "thousands of digits": Raw("9" * 5000),
}
_OTHERS: dict[str, Any] = {
    "null": None,
    "true": True,
    "a text": "7",
    "a list": [],
    "an object": {},
    "nested deep": Raw(DEEP),
}
_TEXTS: dict[str, Any] = {
    "empty": "",
    "two lines": "one\ntwo",
    "a path": "../" * 20 + "etc/passwd",
    "long": "x" * 1_000_000,
    "a number": 10**9,
}


def mutations(document: dict[str, Any]) -> Iterator[Mutation]:
    """All of a document: of a list of objects, each of their fields where it is first and where it is last."""
    yield Mutation((), "an unknown field, nested deep", _text({**document, "unknown": _MARK}, DEEP))
    yield Mutation((), "nested deep", DEEP.encode())
    for path in _paths(document):
        here = _at(document, path)
        for name, value in _values(here).items():
            if isinstance(value, Raw):
                yield Mutation(path, name, _text(_with(document, path, _MARK), value))
            elif value != here or type(value) is not type(here):
                yield Mutation(path, name, _text(_with(document, path, value)))
        if isinstance(path[-1], str):
            yield Mutation(path, "removed", _text(_without(document, path)))


def _values(here: Any) -> dict[str, Any]:
    if isinstance(here, list):
        made: dict[str, Any] = {
            "empty": [],
            "of another type": ["7"],
            "long": (here or [0]) * (LONG // len(here or [0])),
        }
        if here:
            made |= {"first twice": [here[0], *here], "first removed": here[1:], "last removed": here[:-1]}
            made |= {"backwards": here[::-1], "twice": here + here}
        return made | {key: value for key, value in _OTHERS.items() if key != "a list"}
    if isinstance(here, str):
        return _TEXTS | _OTHERS
    if isinstance(here, dict):
        return _OTHERS
    return _NUMBERS | _OTHERS


def _paths(here: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(here, dict):
        for key, value in here.items():
            yield from _paths(value, (*path, key))
    elif isinstance(here, list) and here and isinstance(here[0], dict):
        for key in dict.fromkeys(key for item in here for key in item):
            having = [index for index, item in enumerate(here) if key in item]
            for index in dict.fromkeys((having[0], having[-1])):
                yield from _paths(here[index][key], (*path, index, key))
    elif isinstance(here, list):
        for index in dict.fromkeys((0, len(here) - 1)) if here else ():
            yield from _paths(here[index], (*path, index))


def _at(here: Any, path: Path) -> Any:
    for step in path:
        here = here[step]
    return here


def _with(here: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    copied = here.copy()
    copied[path[0]] = _with(here[path[0]], path[1:], value)
    return copied


def _without(here: Any, path: Path) -> Any:
    *above, last = path
    kept = {key: value for key, value in _at(here, tuple(above)).items() if key != last}
    return _with(here, tuple(above), kept)


def _text(document: Any, raw: str = "") -> bytes:
    return json.dumps(document).replace(json.dumps(_MARK), raw).encode()

"""Which saved tensors a compiled backward asks for by arrivals, read off the very code that will run.

Caches may serve code that was made without our partitioner, and a compiler may leave an op out. A tensor counts as
arriving only where the code names it in the list of its arguments, in one arrival, and else only where it is checked
for its shape or let go of. Of code that cannot be read so nothing arrives.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from typing import Any

from poochplan.torch_private.compiler_internals import code_of_backward

_CALL = re.compile(r"^( *)def call\((?:self, )?args\):\n", re.MULTILINE)
_ARGUMENTS = re.compile(r"^ *(\w+(?:, \w+)*),? = args$", re.MULTILINE)
_ARRIVAL = re.compile(r"^ *\w+ = torch\.ops\.poochplan\.arrive\.default\((\w+), \w+\)$")
_HARMLESS = re.compile(r"^ *(?:assert_size_stride\((\w+), .*|del (\w+))$")
_NAME = re.compile(r"\w+")

_NOTHING: frozenset[int] = frozenset()
_READ: weakref.WeakKeyDictionary[type, tuple[object, frozenset[int]]] = weakref.WeakKeyDictionary()
"""By the class of the node, of which each compiled region has its own: what is called there, and what was read."""


def arriving_positions(node: Any) -> frozenset[int]:
    """Which of the node's saved tensors arrive, by their place in the order of unpacking."""
    kind = type(node)
    called, source, number_count = code_of_backward(node)
    read = _READ.get(kind)
    if read is not None and read[0] is called:
        return read[1]
    if called is None:  # it is compiled when it first runs
        return _NOTHING
    found = frozenset(place - number_count for place in arriving_arguments(source) if place >= number_count)
    _READ[kind] = called, found
    return found


def arriving_arguments(source: str) -> frozenset[int]:
    """Which arguments of the call that ``source`` defines arrive, by their place among the arguments."""
    lines = list(_body(source))
    places = [index for index, line in enumerate(lines) if _ARGUMENTS.match(line)]
    if len(places) != 1:
        return _NOTHING
    unpacking = _ARGUMENTS.match(lines[places[0]])
    assert unpacking is not None
    arguments = unpacking.group(1).split(", ")
    arrivals = dict.fromkeys(arguments, 0)
    read_otherwise: set[str] = set()
    for line in lines[: places[0]] + lines[places[0] + 1 :]:
        arrival, harmless = _ARRIVAL.match(line), _HARMLESS.match(line)
        if arrival is not None and arrival.group(1) in arrivals:
            arrivals[arrival.group(1)] += 1
            read_otherwise.update(_names(line) - {arrival.group(1)})
        elif harmless is not None:
            named = harmless.group(1) or harmless.group(2)
            read_otherwise.update(_names(line) - {named})
        else:
            read_otherwise.update(_names(line))
    return frozenset(
        place for place, name in enumerate(arguments) if arrivals[name] == 1 and name not in read_otherwise
    )


def _names(line: str) -> set[str]:
    return set(_NAME.findall(line))


def _body(source: str) -> Iterator[str]:
    """The lines of the one function ``call``, without comments."""
    begins = list(_CALL.finditer(source))
    if len(begins) != 1:
        return
    indent = len(begins[0].group(1))
    for line in source[begins[0].end() :].splitlines():
        text = line.lstrip(" ")
        if not text or text.startswith("#"):
            continue
        if len(line) - len(text) <= indent:
            return
        yield line

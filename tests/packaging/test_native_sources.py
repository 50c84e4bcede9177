"""The compiled parts: no warning, and no function of the standard library in place of their own."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from poochplan.errors import NativeError
from poochplan.native import NativeBuild
from poochplan.planner.simulator.evaluator import EVALUATOR
from poochplan.runtime.arena.library import ALLOCATOR
from poochplan.runtime.replays.compiled_tape import TAPE
from tests.depth import EVERYTHING
from tests.packaging.folders import ROOT

CLOCK = NativeBuild("clock", ROOT / "tests/planner/evaluator/native", (*EVALUATOR.flags, f"-I{EVALUATOR.sources}"))
OURS = (EVALUATOR, ALLOCATOR, CLOCK)
TAPES = (TAPE,) if EVERYTHING else ()
"""It includes more of torch, which takes half a minute."""
STRICT = "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-Wno-unused-command-line-argument"
"""The last is for clang, which tells of options for linking."""
FUNCTION = re.compile(r"^(?!POOCH|extern)\w[\w:<>*& ]*[ *&](\w+)\(", re.MULTILINE)
"""The name of a function of a namespace: its definition is not indented."""
HEADERS = "algorithm", "array", "atomic", "cstdint", "limits", "mutex", "new", "tuple", "utility", "vector"
FOUND_IN_STD = """
namespace std {
template <class... Given> struct found_in_std {
  static_assert(sizeof...(Given) == 0, "qualify it");
  using type = void;
};
%s
}
"""


def check(part: NativeBuild, file: Path, *more: str) -> str:
    """What this machine's compiler says of a file of the part, as it would build it, with warnings as errors."""
    try:
        command = shlex.split(part.compiler_name()), part.options()
    except NativeError as error:
        pytest.skip(str(error))
    if not command[0]:
        pytest.skip("no C++ compiler here")
    return said(*command[0], *part.flags, f"-I{part.sources}", *more, *STRICT, str(file), *command[1])


def said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr or done.returncode == 0
    return done.stderr


def functions_of(folders: Sequence[Path]) -> set[str]:
    text = "".join(file.read_text() for folder in folders for file in folder.iterdir())
    return set(FUNCTION.findall(text))


@pytest.mark.parametrize("part", [*OURS, *TAPES], ids=lambda part: part.name)
def test_it_is_compiled_without_a_warning(part: NativeBuild) -> None:
    assert check(part, part.sources / f"{part.name}.cpp") == ""


@pytest.mark.parametrize("part", OURS, ids=lambda part: part.name)
def test_its_calls_with_a_vector_cannot_mean_a_function_of_the_standard_library(
    part: NativeBuild, tmp_path: Path
) -> None:
    """A name looked up in std for the sake of an argument may be found there in the next library: `apply` was."""
    names = functions_of([part.sources, EVALUATOR.sources])
    assert {"add_moves", "put", "clear", "merge"} <= names
    again = "template <class... Given> typename found_in_std<Given...>::type {}(Given&&...);".format
    includes = "".join(f"#include <{name}>\n" for name in HEADERS)
    poisoned = FOUND_IN_STD % "\n".join(map(again, sorted(names)))
    file = tmp_path / "poisoned.cpp"
    file.write_text(f'{includes}{poisoned}#include "{part.sources / part.name}.cpp"\n')
    assert check(part, file) == ""

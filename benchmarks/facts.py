"""What scripts share: their options, the results file and what it says of the run that made it, and lines of tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "pulp", "highspy")
MIB = 1 << 20
Row = dict[str, Any]


def parser_of(doc: str | None, prog: str | None = None, **options: Any) -> argparse.ArgumentParser:
    """It shows the script's docstring, and has ``-o`` for the results file.

    ``options``: of each the default, from which its type follows, or the default and a line of help. A list takes one
    value or more, False is a switch.
    """
    parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the results as JSON here")
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, "")
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        first = default[0] if isinstance(default, list) else default
        kind: dict[str, Any] = {
            "type": type("" if first is None else first),
            "nargs": "+" if isinstance(default, list) else None,
        }
        parser.add_argument(flag, default=default, help=f"{text} (default: %(default)s)".strip(), **kind)
    return parser


def facts_of_run(arguments: argparse.Namespace, packages: tuple[str, ...] = PACKAGES) -> Row:
    """Commit (with ``+`` when tracked files differ from it), versions of ``packages``, processor, and the arguments."""
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()},
        "arguments": {name: _named(value) for name, value in vars(arguments).items() if name != "output"},
    }


def _named(value: Any) -> Any:
    """An argument; of a file on this machine its name."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def write_results(path: str | Path | None, found: Any) -> None:
    """Writes what was found as JSON, where a path is given."""
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def rows_in(path: str | Path, part: str = "rows") -> list[Row]:
    """Of a results file."""
    return list(json.loads(Path(path).read_text(encoding="utf-8")).get(part, []))


def known_rows(path: str | Path | None, part: str = "rows") -> list[Row]:
    """Of a results file that a run goes on with; none where there is no such file."""
    return rows_in(path, part) if path and Path(path).exists() else []


def taken(
    arguments: argparse.Namespace,
    names: Iterable[Any],
    rows_of: Callable[[Any], Row | list[Row]],
    shown: Callable[[Row], str] = json.dumps,
    packages: tuple[str, ...] = PACKAGES,
    **beside: Any,
) -> list[Row]:
    """The rows of each name; they are shown and written as they come."""
    facts, rows = facts_of_run(arguments, packages), list[Row]()
    for name in names:
        found = rows_of(name)
        rows += found if isinstance(found, list) else [found]
        print(*map(shown, found if isinstance(found, list) else [found]), sep="\n", flush=True)
        write_results(arguments.output, facts | beside | {"rows": rows})
    return rows


def table_row(*cells: object) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_head(*names: str) -> str:
    return f"{table_row(*names)}\n{table_row(*['---'] * len(names))}"


def yes(holds: object) -> str:
    return "yes" if holds else "NO"


def _commit() -> str:
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("POOCH_COMMIT", "unknown")  # a copy without its history is told


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""The packages that there are, by their folders: what ``packages`` in pyproject.toml has to list.

``make packages`` writes the list anew after a folder has come or gone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LIST = re.compile(r"^packages = \[\n(?:.*,\n)*\]$", re.MULTILINE)


def listed_packages() -> list[str]:
    """What pyproject.toml lists."""
    packages: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    return packages


def package_folders() -> dict[str, Path]:
    """Every package and its folder: each folder with an ``__init__.py`` under those that package-dir names.

    Goes by package-dir and never through a link, so that it finds the same in a checkout without symbolic links.
    """
    homes: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return {package: folder for name, home in homes.items() for package, folder in _under(name, ROOT / home)}


def _under(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    if name and (folder / "__init__.py").is_file():
        yield name, folder
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and child.name.isidentifier():
            yield from _under(f"{name}.{child.name}" if name else child.name, child)


def main() -> None:
    """Writes the list of packages into pyproject.toml."""
    lines = "".join(f'    "{package}",\n' for package in sorted(package_folders()))
    file = ROOT / "pyproject.toml"
    text, count = _LIST.subn(f"packages = [\n{lines}]", file.read_text())
    if count != 1:
        raise SystemExit("pyproject.toml: expected one list of packages, one package a line, under [tool.setuptools]")
    file.write_text(text)


if __name__ == "__main__":
    main()

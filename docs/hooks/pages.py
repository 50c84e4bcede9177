"""Pages of the site that live outside ``docs/``, so that each text exists once and its links work in both places."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    **{
        f"benchmarks/pages/{path.name}": f"benchmarks/{path.name}"
        for path in sorted((ROOT / "benchmarks/pages").glob("*.md"))
    },
    "benchmarks/instances/README.md": "instances.md",
    "LICENSE": "license.txt",
    "runtime/arena/native/arena.h": "runtime/arena/native/arena.h",
    **{f"examples/{path.name}": f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.*"))},
}
"""Path in the repository -> page or file of the site. Everything else comes from ``docs/``."""
IN_REPOSITORY = {page: path for path, page in PAGES.items()}
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside ``docs/``."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the repository has them, turned into links between pages of the site."""
    source = IN_REPOSITORY.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _FENCED.split(markdown)
    here = posixpath.dirname(page.file.src_uri)
    return "".join(part if part.startswith("```") else _with_site_links(part, source, here) for part in parts)


def _with_site_links(text: str, source: str, here: str) -> str:
    """``source`` is the text's path in the repository, ``here`` its page's folder in the site."""

    def to_site(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = PAGES.get(path, path.removeprefix("docs/"))
        return match[1] + posixpath.relpath(target, here or ".") + match[3]

    return _LINK.sub(to_site, text)

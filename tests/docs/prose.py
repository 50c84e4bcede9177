"""Sentences of a Markdown text, as a reader counts them: without code, tables and headings."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SKIPPED = re.compile(r"^(#|\||<!--|    |!\[|---$)")
_ITEM = re.compile(r"^\s*([*-]|\d+\.) +")
_END = re.compile(r"(?<=[.!?])[*)]*\s+|(?<=[.!?]\))\s+")


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence. A list item begins a sentence; colons and semicolons end none."""
    paragraphs: list[str] = [""]
    for line in _FENCED.sub("", text).splitlines():
        if _SKIPPED.match(line) or not line.strip():
            paragraphs.append("")
        elif _ITEM.match(line):
            paragraphs.append(_ITEM.sub("", line))
        else:
            paragraphs[-1] += " " + line.strip()
    found = (part.split() for paragraph in paragraphs for part in _END.split(re.sub(r"`[^`]*`", "code", paragraph)))
    return [words for words in found if words]


def measure(path: Path) -> tuple[int, float, int]:
    """Sentences, mean words of one, words of the longest."""
    lengths = [0, *(len(words) for words in sentences(path.read_text(encoding="utf-8")))]
    return len(lengths) - 1, mean(lengths[1:] or [0]), max(lengths)


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        count, average, longest = measure(page)
        print(f"{page.name:20} {count:4} sentences, {average:4.1f} words in the mean, {longest} at most")

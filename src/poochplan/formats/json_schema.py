"""JSON Schemas of the files, for those who read them without this package.

``python -m poochplan.formats.json_schema docs/schemas`` writes them anew; a test holds them to the types.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec

from .pass_profile import PassProfile
from .plan import Plan
from .profile import Profile

FILES: dict[str, type[msgspec.Struct]] = {
    "profile.schema.json": Profile,
    "plan.schema.json": Plan,
    "inference.schema.json": PassProfile,
}


def json_schema(kind: type[msgspec.Struct]) -> bytes:
    """The JSON Schema (2020-12) of a kind of file, as it is published."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_without_indentation(msgspec.json.schema(kind)),
    }
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=2) + b"\n"


def _without_indentation(schema: Any) -> Any:
    """The schema with its docstrings as Python 3.13 has them. Earlier versions keep the indentation."""
    if isinstance(schema, dict):
        cleaned = {name: _without_indentation(part) for name, part in schema.items()}
        if isinstance(text := cleaned.get("description"), str):
            cleaned["description"] = inspect.cleandoc(text)
        return cleaned
    return [_without_indentation(part) for part in schema] if isinstance(schema, list) else schema


def main() -> None:
    """Writes the schemas into the folder that is named."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(
            "usage: python -m poochplan.formats.json_schema FOLDER; expected a folder that exists, such as docs/schemas"
        )
    for name, kind in FILES.items():
        (Path(sys.argv[1]) / name).write_bytes(json_schema(kind))


if __name__ == "__main__":
    main()

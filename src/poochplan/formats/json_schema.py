"""JSON Schemas of the files, for those who read them without this package.

``python -m poochplan.formats.json_schema docs/schemas`` writes them anew; a test holds them to the types.
"""

from __future__ import annotations

import sys
from pathlib import Path

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
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind)}
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=2) + b"\n"


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

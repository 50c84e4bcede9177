"""A file of any kind that this package writes: what it is, and what is in it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from poochplan.errors import InputFileError
from poochplan.formats.files import one_line, read_data
from poochplan.formats.passes.pass_profile import PassProfile
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile

from .run_record import RunRecord

Inspected = Profile | PassProfile | Plan | RunRecord
KINDS: dict[str, type[Inspected]] = {"profile": Profile, "inference": PassProfile, "plan": Plan, "run": RunRecord}


def load_any(path: str | Path) -> Inspected:
    """The profile (of a step, or a pass), plan or run in the file, by the kind that it says it is.

    Raises
    ------
    UsageError
        There is no such file.
    InputFileError
        It is none of these, or what loading that kind raises.
    """
    kind = _kind_of(Path(path))
    if kind not in KINDS:
        raise InputFileError(
            f"{path}: expected a file of pooch profile, pooch plan or pooch run -o, found "
            f"{f'kind {one_line(repr(kind))}' if kind else 'one that does not say its kind'}; name one of those"
        )
    return KINDS[kind].load(path)


def _kind_of(source: Path) -> str:
    missing = "no such file; name one that pooch profile, plan or run -o wrote"
    data = read_data(source, "a profile, a plan or a run", missing)
    try:
        return msgspec.json.decode(data, type=_Header).kind
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputFileError(
            f"{source}: truncated or not JSON of this package ({one_line(error)}); expected a profile, a plan or a run"
        ) from None


class _Header(msgspec.Struct):
    kind: str = ""

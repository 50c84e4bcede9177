"""Reading and writing profile and plan files: typed, atomic, never over a user's file unless asked."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import os
import tempfile
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from poochplan.errors import InputFileError, OutputExistsError, PoochError, UsageError

T = TypeVar("T", bound=msgspec.Struct)

OLDEST_SCHEMA_VERSION = 1
"""Files of every version from this one on can be read."""


def check_output(path: str | Path, *, force: bool = False) -> Path:
    """The path, if it may be written: its folder exists and no file is there (or ``force``).

    Called before the work starts, so that nobody waits for minutes to learn that the name is taken.

    Raises
    ------
    OutputExistsError
        The file exists and ``force`` is false.
    UsageError
        The folder does not exist, or the path is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{target}: expected a file to write, found a folder; name a file in it")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: the folder {target.parent} does not exist; create it or name another")
    if target.exists() and not force:
        raise OutputExistsError(f"{target} exists and will not be overwritten; pass --force or name another file")
    return target


def write_atomic(path: str | Path, data: bytes, *, force: bool = False) -> Path:
    """Writes ``data`` to a temporary neighbour and moves it into place, so no half-written file is ever seen.

    A path that ends in ``.gz`` is compressed. Raises what :func:`check_output` raises.
    """
    target = check_output(path, force=force)
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    descriptor, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(scratch).chmod(0o666 & ~umask)
        if force:
            Path(scratch).replace(target)
        else:
            try:  # a link fails where a replace would overwrite a file that appeared meanwhile
                os.link(scratch, target)
            except FileExistsError:
                raise OutputExistsError(f"{target} exists and will not be overwritten; pass --force") from None
            except OSError:  # file systems without hard links
                Path(scratch).replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(scratch).unlink()
    return target


def package_version() -> str:
    """The release that writes a file. Asked late, since the package imports this."""
    return str(importlib.import_module(__name__.partition(".")[0]).__version__)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/poochplan``, by default in ``~/.cache``; a relative path there is ignored."""
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (asked if asked.is_absolute() else Path.home() / ".cache") / "poochplan"


def write_cache(path: Path, data: bytes) -> None:
    """Writes ``data`` whole or not at all; a cache that cannot be written is no reason to fail."""
    with contextlib.suppress(OSError, PoochError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data, force=True)


def write_struct(path: str | Path, value: msgspec.Struct, *, force: bool = False) -> Path:
    """Writes a struct as JSON in a stable field order, one line per list element, so that a diff can be read."""
    return write_atomic(path, encode_readable(value), force=force)


def encode_readable(value: msgspec.Struct) -> bytes:
    """JSON with one line per field, and one line per element of a top-level list."""
    lines = []
    for key, field in msgspec.json.decode(msgspec.json.encode(value), type=dict[str, msgspec.Raw]).items():
        name = _line(msgspec.json.encode(key))
        if bytes(field)[:1] == b"[" and bytes(field) != b"[]":
            elements = msgspec.json.decode(field, type=list[msgspec.Raw])
            lines.append(b"  %b: [\n    %b\n  ]" % (name, b",\n    ".join(map(_line, elements))))
        elif bytes(field)[:1] == b"{" and bytes(field) != b"{}":
            members = msgspec.json.decode(field, type=dict[str, msgspec.Raw]).items()
            inner = [b"%b: %b" % (msgspec.json.encode(member), _line(item)) for member, item in members]
            lines.append(b"  %b: {\n    %b\n  }" % (name, b",\n    ".join(inner)))
        else:
            lines.append(b"  %b: %b" % (name, _line(field)))
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def _line(item: bytes | msgspec.Raw) -> bytes:
    """JSON on one line, with spaces."""
    return msgspec.json.format(bytes(item), indent=0)


def read_struct(path: str | Path, kind: type[T], *, what: str, schema_version: int) -> T:
    """The struct in a JSON (or ``.gz``) file.

    ``what`` is "profile" or "plan", for messages; ``schema_version`` is the newest this release reads, every older one
    among them.

    Raises
    ------
    UsageError
        The file does not exist.
    InputFileError
        The file is truncated, is not JSON, has a newer schema, or a field is missing or of the wrong type.
    """
    source = Path(path)
    try:
        data = source.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise UsageError(f"{source}: no such {what} file; make one with `pooch {what}`") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputFileError(f"{source}: cannot be read ({error}); expected a {what}") from None
    _check_schema(source, data, what, schema_version)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise InputFileError(f"{source}: not a valid {what}: {error}; make it again with `pooch {what}`") from None


def _check_schema(source: Path, data: bytes, what: str, schema_version: int) -> None:
    again = f"make it again with `pooch {what}`"
    try:
        header = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputFileError(f"{source}: truncated or not JSON ({error}); expected a {what}; {again}") from None
    found = header.get("kind")
    if found is None or msgspec.json.decode(found) != what:
        if found is not None and msgspec.json.decode(found) == "inference":
            raise InputFileError(
                f"{source}: expected a {what} of a training step, found a forward pass alone, of which nothing has to "
                "be moved; its layout is in the file and poochplan.arena(model) serves it, `pooch show` says what it is"
            )
        seen = "no kind" if found is None else f"kind {bytes(found).decode()}"
        raise InputFileError(f'{source}: expected a {what} (kind "{what}"), found {seen}; {again}')
    version = msgspec.json.decode(header.get("schema_version", msgspec.Raw(b"0")))
    if not isinstance(version, int) or not OLDEST_SCHEMA_VERSION <= version <= schema_version:
        newer = isinstance(version, int) and version > schema_version
        read = " or ".join(str(one) for one in range(OLDEST_SCHEMA_VERSION, schema_version + 1))
        remedy = "update poochplan" if newer else again
        raise InputFileError(f"{source}: expected {what} schema {read}, found schema {version}; {remedy} to read it")

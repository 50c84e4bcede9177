"""Reads and writes profile and plan files: typed, atomic, and never over a user's file unless asked."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from poochplan.errors import InputFileError, OutputExistsError, PoochError, UsageError

C = TypeVar("C")

OLDEST_SCHEMA_VERSION = 1
"""Files of every version from this one on can be read."""
MOST_FILE_BYTES = 1 << 29
"""Largest size of a file that is read, decompressed: a hundred times the largest profile so far."""
MOST_SAID = 300
"""Most characters of a file's content, or of a library's message about it, that a message quotes."""
Rows = Sequence[Sequence[str]]
"""Each row is as long as the headings; the first cell names the row."""
_EXISTS = "exists and will not be overwritten; pass --force or name another file"
_LEFT = ' style="text-align: left; vertical-align: top"'


def check_output(path: str | Path, *, force: bool = False) -> Path:
    """The path, if it may be written: its folder exists and no file is there (or ``force``).

    Called before the work starts, so that nobody waits for minutes to learn that the name is taken.

    Raises
    ------
    OutputExistsError
        The file exists and ``force`` is false.
    UsageError
        The folder does not exist or cannot be written, or the path is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{target}: expected a file to write, found a folder; name a file in it")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: the folder {target.parent} does not exist; create it or name another")
    if target.exists() and not force:
        raise OutputExistsError(f"{target} {_EXISTS}")
    try:  # a file without a name, which leaves nothing behind: modes alone do not tell
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise UsageError(
            f"{target}: the folder {target.parent} cannot be written ({error.strerror}); name another"
        ) from None
    return target


def write_atomic(path: str | Path, data: bytes, *, force: bool = False) -> Path:
    """Writes ``data`` to a temporary folder next to the path and moves it into place, so no half-written file is ever
    visible.

    A path that ends in ``.gz`` is compressed. Raises what :func:`check_output` raises.
    """
    target = check_output(path, force=force)
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        scratch = Path(folder) / target.name
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if force:
            scratch.replace(target)
        else:
            try:  # a link fails where a replace would overwrite a file that appeared meanwhile
                os.link(scratch, target)
            except FileExistsError:
                raise OutputExistsError(f"{target} {_EXISTS}") from None
            except OSError:  # file systems without hard links
                scratch.replace(target)
    return target


def package_version() -> str:
    """The release that writes a file. It is read late, because the package imports this module."""
    return str(importlib.import_module(__name__.partition(".")[0]).__version__)


NO_HOME = Path("/dev/null/no-home-folder")
"""Stands for the home folder of a user who has none. Nothing can be made there."""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/poochplan``, by default in ``~/.cache``; a relative path there is ignored."""
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not asked.is_absolute():
        try:
            asked = Path.home() / ".cache"
        except RuntimeError:  # neither HOME nor an entry for the user
            asked = NO_HOME
    return asked / "poochplan"


def write_cache(path: Path, data: bytes) -> str:
    """Writes ``data`` completely or not at all. A cache that cannot be written is no error: returns why, else an empty
    text.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data, force=True)
    except (OSError, PoochError) as error:
        return (error.strerror if isinstance(error, OSError) else "") or one_line(error)
    return ""


def not_kept(folder: Path, why: str) -> str:
    """The line for the user if a cache could not be written; empty if ``why`` is."""
    return why and (
        f"{folder}: cannot be written ({why}), so nothing is kept there and the next run begins anew; name another "
        "folder (by XDG_CACHE_HOME, or auto's cache=...)"
    )


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON file of this package. Subclasses write their kind first, then their schema version."""

    newest: ClassVar[int] = 1
    """The schema version that is written; all older ones can be read too."""
    heading: ClassVar[str]
    """The heading of the table, with ``{}`` for the workload."""

    def rows(self) -> dict[str, str]:
        """The most important facts, in words."""
        raise NotImplementedError

    def faults(self) -> Iterator[str]:
        """Faults between its fields, in words: where, what was expected, what was found."""
        return iter(())

    @property
    def title(self) -> str:
        return self.heading.format(self.workload)  # type: ignore[attr-defined]

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes it as JSON (compressed if the name ends in ``.gz``); over an existing file only with ``force``."""
        data = encode_readable(msgspec.structs.replace(self, schema_version=self.newest))
        return write_atomic(path, data, force=force)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a JSON (or ``.gz``) file of this version or an older one.

        Raises
        ------
        UsageError
            The file does not exist.
        InputFileError
            The file is truncated, is not JSON, has a newer schema, or a field is missing, of the wrong type, out of its
            range or inconsistent with the others.
        """
        what = next(field.default for field in msgspec.structs.fields(cls) if field.name == "kind")
        source = Path(path)
        data = read_data(source, f"a {what}", f"no such {what} file; make one with `pooch {what}`")
        _check_schema(source, data, what, cls.newest)
        try:
            found = msgspec.json.decode(data, type=cls)
            fault = next(found.faults(), "")
        except msgspec.MsgspecError as error:
            said, at, place = str(error).partition(" - at `$")
            fault = f"{one_line(said)}{at}{place}{_found_there(data, place)}"
        except (UnicodeDecodeError, RecursionError, MemoryError) as error:
            fault = f"expected JSON that can be read, found that it cannot ({one_line(error)})"
        if fault:
            raise InputFileError(f"{source}: not a valid {what}: {fault}; make it again with `pooch {what}`")
        return found

    def _repr_html_(self) -> str:
        """In a notebook: the rows."""
        return html_table(self.title, list(self.rows().items()))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In IPython: the rows as text."""
        printer.text(text_table(self.title, list(self.rows().items())))


def encode_readable(value: msgspec.Struct) -> bytes:
    """JSON in a stable field order, with one line per field and per element of a top-level list: a diff is readable."""
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


def read_data(source: Path, what: str, missing: str) -> bytes:
    """The content of a file, decompressed if necessary. ``what`` is expected in it; ``missing`` is the message if it
    does not exist.

    Raises
    ------
    UsageError
        The file does not exist, or is a folder.
    InputFileError
        It cannot be read, or is larger than any file that this package writes.
    """
    if source.is_dir():
        raise UsageError(f"{source}: expected {what}, found a folder; name a file in it")
    try:
        with source.open("rb") as file:
            data = file.read(MOST_FILE_BYTES + 1)
        if data[:2] == b"\x1f\x8b":
            # At most one byte more than a file may have: a small file may decompress to a thousand times its size.
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MOST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{source}: {missing}") from None
    except (OSError, EOFError, zlib.error, ValueError, MemoryError) as error:
        raise InputFileError(f"{source}: cannot be read ({one_line(error)}); expected {what}") from None
    if len(data) > MOST_FILE_BYTES:
        raise InputFileError(
            f"{source}: expected {what} of at most {MOST_FILE_BYTES} bytes, decompressed, found more; name another file"
        )
    return data


def read_cache(path: Path, kind: type[C]) -> C | None:
    """The content of a JSON file in the user's cache folder; None if it is missing or broken."""
    try:
        return msgspec.json.decode(read_data(path, "a cache", "none"), type=kind)
    except (PoochError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError):
        return None


def one_line(error: object) -> str:
    """The error's message on one line of at most a few hundred characters; the error's name if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}..."


class _Header(msgspec.Struct):
    kind: msgspec.Raw = msgspec.Raw()
    schema_version: msgspec.Raw = msgspec.Raw(b"0")


def _check_schema(source: Path, data: bytes, what: str, schema_version: int) -> None:
    again = f"make it again with `pooch {what}`"
    try:
        header = msgspec.json.decode(data, type=_Header)
        kind = msgspec.json.decode(header.kind) if bytes(header.kind) else None
        version = msgspec.json.decode(header.schema_version)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else one_line(error)
        raise InputFileError(f"{source}: truncated or not JSON ({why}); expected a {what}; {again}") from None
    if kind != what:
        if kind == "inference":
            raise InputFileError(
                f"{source}: expected a {what} of a training step, found a forward pass alone, of which nothing has to "
                "be moved; its layout is in the file and poochplan.arena(model) serves it, `pooch show` says what it is"
            )
        seen = f"kind {one_line(bytes(header.kind).decode())}" if bytes(header.kind) else "no kind"
        raise InputFileError(f'{source}: expected a {what} (kind "{what}"), found {seen}; {again}')
    if type(version) is not int or not OLDEST_SCHEMA_VERSION <= version <= schema_version:
        newer = type(version) is int and version > schema_version
        read = " or ".join(str(one) for one in range(OLDEST_SCHEMA_VERSION, schema_version + 1))
        remedy = "update poochplan" if newer else again
        seen = one_line(bytes(header.schema_version).decode())
        raise InputFileError(f"{source}: expected {what} schema {read}, found schema {seen}; {remedy} to read it")


_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


def _found_there(data: bytes, place: str) -> str:
    """The value at a path such as ``.values[3].size_bytes``, if a field there is wrong and not missing."""
    try:
        found = msgspec.json.decode(data)
        for name, index in _STEP.findall(place):
            found = found[name] if name else found[int(index)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError, LookupError, TypeError, ValueError):
        return ""
    return f", found {one_line(repr(found))}" if isinstance(found, (bool, int, float, str, list)) else ""


def html_table(title: str, rows: Rows, headings: Sequence[str] = ()) -> str:
    """A table with its title above, for ``_repr_html_``; every text is escaped."""
    head = "".join(f"<th{_LEFT}>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th{_LEFT}>{escape(name)}</th>{''.join(f'<td{_LEFT}>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<table><caption{_LEFT}>{escape(title)}</caption>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def text_table(title: str, rows: Rows, headings: Sequence[str] = ()) -> str:
    """The same in lines, each column as wide as its longest cell; no spaces at the ends of lines."""
    listed = [tuple(headings), *rows] if headings else list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed)
    return "\n".join([title, *lines])


def beyond(where: str, indices: Sequence[int], count: int, of: str) -> Iterator[str]:
    """The fault of the first index that is not below ``count``, in words; ``{}`` in ``where`` is its position."""
    if max(indices, default=-1) >= count:
        place = next(place for place, index in enumerate(indices) if index >= count)
        yield f"{where.format(place)}: expected less than {count}, the number of {of}, found {indices[place]}"


def numbered(name: str, texts: Sequence[str]) -> dict[str, str]:
    """A row for each text: ``note 1``, ``note 2``, and so on."""
    return {f"{name} {number}": text for number, text in enumerate(texts, 1)}

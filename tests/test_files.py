"""Files are written whole or not at all, never over a user's file, and read with one clear line when they are bad."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from poochplan.errors import InputFileError, OutputExistsError, UsageError
from poochplan.formats import files
from poochplan.formats.files import (
    Document,
    cache_folder,
    check_output,
    encode_readable,
    not_kept,
    read_cache,
    write_atomic,
    write_cache,
)


class Note(Document, frozen=True, kw_only=True):
    newest: ClassVar[int] = 2
    kind: str = "note"
    schema_version: int = 2
    words: tuple[tuple[str, int], ...] = ()
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    empty: tuple[int, ...] = ()


NOTE = Note(words=(("keep", 1), ("swap", 2)), counts={"a": 1, "b": 2})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_gz_file_is_compressed_and_the_same_every_time(tmp_path: Path) -> None:
    first = NOTE.save(tmp_path / "a.json.gz").read_bytes()
    second = NOTE.save(tmp_path / "b.json.gz").read_bytes()
    assert first == second
    assert json.loads(gzip.decompress(first))["kind"] == "note"


def test_each_list_element_has_its_own_line_as_python_writes_it() -> None:
    note = msgspec.structs.replace(NOTE, words=(('naïve "quoted"\n', 3), ("[1,2]", -1)), counts={"a: b": 1, "c": 2})
    text = encode_readable(note).decode()
    assert {'    ["[1,2]", -1]', '    "a: b": 1,', '    "c": 2', '  "empty": []'} <= {*text.splitlines()}
    assert msgspec.json.decode(text, type=Note) == note
    assert json.loads(text)["counts"] == note.counts


def test_an_existing_file_is_not_overwritten_without_force(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_text("mine")
    with pytest.raises(OutputExistsError, match=r"note\.json exists and will not be overwritten; pass --force"):
        write_atomic(path, b"new")
    assert path.read_text() == "mine"
    write_atomic(path, b"new", force=True)
    assert path.read_text() == "new"
    assert names(tmp_path) == ["note.json"]


def test_a_file_that_appears_during_the_write_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "note.json"
    flush = os.fsync

    def appear(descriptor: int) -> None:
        path.write_text("theirs")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", appear)
    with pytest.raises(OutputExistsError):
        write_atomic(path, b"mine")
    assert path.read_text() == "theirs"
    assert names(tmp_path) == ["note.json"]


@pytest.mark.parametrize(("stage", "force"), [("fsync", False), ("link", False), ("fsync", True), ("replace", True)])
def test_a_crash_while_writing_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, force: bool
) -> None:
    path = tmp_path / "note.json"
    if force:
        path.write_text("before")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path if stage == "replace" else os, stage, crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"half", force=force)
    assert names(tmp_path) == (["note.json"] if force else [])
    if force:
        assert path.read_text() == "before"


def test_a_file_system_without_hard_links_is_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert write_atomic(tmp_path / "note.json", b"data").read_bytes() == b"data"
    assert names(tmp_path) == ["note.json"]


def test_the_users_umask_holds(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write_atomic(tmp_path / "note.json", b"data")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_an_output_needs_a_folder_and_a_file_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found a folder; name a file in it"):
        check_output(tmp_path)
    with pytest.raises(UsageError, match="does not exist; create it or name another"):
        check_output(tmp_path / "missing" / "note.json")
    with pytest.raises(UsageError, match="the folder /proc cannot be written"):
        check_output("/proc/note.json")
    assert check_output(tmp_path / "note.json") == tmp_path / "note.json"
    assert names(tmp_path) == []


def test_a_cache_that_cannot_be_written_says_why_and_a_user_without_a_home_has_such_a_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert write_cache(tmp_path / "deep" / "note.json", b"data") == ""
    (tmp_path / "file").touch()
    assert write_cache(tmp_path / "file" / "note.json", b"data") == "File exists"
    assert write_cache(Path("/proc/none/note.json"), b"data") == "No such file or directory"
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(none))
    assert write_cache(cache_folder() / "note.json", b"data") == "Not a directory"
    assert read_cache(cache_folder() / "note.json", dict[str, int]) is None
    assert not_kept(cache_folder(), "") == ""
    assert not_kept(cache_folder(), "Not a directory").startswith(
        f"{cache_folder()}: cannot be written (Not a directory)"
    )


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such note file; make one with `pooch note`") as caught:
        Note.load(tmp_path / "none.json")
    assert caught.value.exit_code == 2


def test_every_truncation_is_one_clear_error(tmp_path: Path) -> None:
    whole = encode_readable(NOTE).rstrip()
    path = tmp_path / "note.json"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(InputFileError, match=r"expected a note; make it again with `pooch note`") as caught:
            Note.load(path)
        assert "\n" not in str(caught.value)


def test_a_truncated_or_damaged_gz_is_a_clear_error(tmp_path: Path) -> None:
    path = NOTE.save(tmp_path / "note.json.gz")
    whole = path.read_bytes()
    path.write_bytes(whole[:-12])
    with pytest.raises(InputFileError, match="cannot be read"):
        Note.load(path)
    for at in range(10, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(InputFileError, match="expected a note"):
            Note.load(path)


@pytest.mark.parametrize("name", ["note.json", "note.json.gz"])
def test_a_file_is_read_up_to_a_size_however_small_it_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(files, "MOST_FILE_BYTES", 1000)
    NOTE.save(tmp_path / name)
    assert names(tmp_path) == [name]
    assert Note.load(tmp_path / name) == NOTE
    write_atomic(tmp_path / name, encode_readable(NOTE) + b" " * 1000, force=True)
    with pytest.raises(InputFileError, match="expected a note of at most 1000 bytes, decompressed, found more"):
        Note.load(tmp_path / name)


def test_compressed_files_one_behind_the_other_are_one(tmp_path: Path) -> None:
    whole = encode_readable(NOTE)
    (tmp_path / "note.json.gz").write_bytes(gzip.compress(whole[:50]) + gzip.compress(whole[50:]))
    assert Note.load(tmp_path / "note.json.gz") == NOTE


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 200_000, '{"words": 3}', "\xff"])
def test_a_cache_that_is_broken_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cache.json"
    assert read_cache(path, Note) is None
    path.write_text(text, encoding="latin-1")
    assert read_cache(path, Note) is None
    path.write_bytes(encode_readable(NOTE))
    assert read_cache(path, Note) == NOTE


def changed(text: str = "", **fields: object) -> bytes:
    """The file with other fields; ``text`` is there for the value ``"@"``."""
    return json.dumps(json.loads(encode_readable(NOTE)) | fields).replace('"@"', text).encode()


DEEP = ("[" * 2_000_000 + "]" * 2_000_000, '{"a":' * 2_000_000 + "1" + "}" * 2_000_000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(schema_version=3), r"expected note schema 1 or 2, found schema 3; update poochplan to read it"),
        (changed(schema_version=0), r"expected note schema 1 or 2, found schema 0; make it again"),
        (changed(kind="plan"), r'expected a note \(kind "note"\), found kind "plan"'),
        (changed(kind=None), r"found kind null"),
        (changed(counts={"a": "many"}), r"not a valid note: Expected `int`, got `str` - at `\$\.counts"),
        (changed(words=3), r"not a valid note: Expected `array`, got `int` - at `\$\.words`"),
        (changed(empty=[1, "many " * 1000]), r"got `str` - at `\$\.empty\[1\]`, found 'many many"),
        *((text, "note") for text in (b"[]", b"3", b'"note"', b"{}", b"null")),
        *((text, "truncated or not JSON") for text in (b"\xef\xbb\xbf{}", b"\x80\x81\xff")),
        *((changed(text, **{field: "@"}), "note") for text in DEEP for field in (*NOTE.__struct_fields__, "unknown")),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_file_that_is_not_ours_or_has_a_wrong_or_deep_field_is_one_short_line_that_names_it(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=message) as caught:
        Note.load(path)
    assert len(str(caught.value)) < 1000
    path.write_bytes(changed(schema_version=1))
    assert Note.load(path).words == NOTE.words, "of an earlier version"

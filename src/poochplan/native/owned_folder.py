"""Folders that nobody else can write: code that a process loads must not come from another user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from poochplan.errors import NativeError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_folder(folder: Path) -> None:
    """Makes ``folder`` and its parent for this user alone (mode 0700), and checks both.

    Raises
    ------
    NativeError
        It cannot be made, or what is there is not this user's alone.
    """
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for one in (folder.parent, folder):
            one.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NativeError(
            f"{folder}: cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder you own"
        ) from None
    check_makeable(folder)


def check_makeable(folder: Path) -> None:
    """That ``folder`` is this user's alone, or can be made. Makes nothing.

    Raises
    ------
    NativeError
        What :func:`check_folder` raises, or it cannot be written or made.
    """
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if there == folder:
        check_folder(folder)
    if not os.access(there, os.W_OK):
        raise NativeError(
            f"{there}: expected a folder that can be written, found one that cannot; set XDG_CACHE_HOME to another"
        )


def check_folder(folder: Path) -> None:
    """That ``folder`` and its parent are this user's alone, and that nobody can put others in their place.

    Raises
    ------
    NativeError
        Another owner, a mode by which others write, or something that is no folder.
    """
    for one in (folder, folder.parent):
        facts = _facts(one)
        if not stat.S_ISDIR(facts.st_mode):
            raise NativeError(f"{one}: expected a folder, found something else; remove it")
        _check_owner(one, facts, {os.geteuid()})
        if facts.st_mode & _OTHERS_WRITE:
            raise NativeError(_writable_message(one, facts, "go-w"))
    # Whoever owns the root can change anything; in a user namespace that is not number 0.
    trusted = {os.geteuid(), 0, _facts(Path("/")).st_uid}
    for above in folder.parent.resolve().parents:
        facts = _facts(above)
        _check_owner(above, facts, trusted)
        # A group of the user's own may write there: many systems make home folders so.
        if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
            raise NativeError(_writable_message(above, facts, "o-w"))


def check_file(file: Path) -> None:
    """That ``file`` is this user's, and that nobody else writes it.

    Raises
    ------
    NativeError
        Another owner, a mode by which others write, or something that is no file.
    """
    facts = _facts(file)
    if not stat.S_ISREG(facts.st_mode):
        raise NativeError(f"{file}: expected a file, found something else; remove it")
    _check_owner(file, facts, {os.geteuid()})
    if facts.st_mode & _OTHERS_WRITE:
        raise NativeError(_writable_message(file, facts, "go-w"))


def _facts(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except OSError as error:
        raise NativeError(
            f"{path}: cannot be looked at ({error.strerror}); set XDG_CACHE_HOME to another folder"
        ) from None


def _check_owner(path: Path, facts: os.stat_result, allowed: set[int]) -> None:
    if facts.st_uid not in allowed:
        raise NativeError(
            f"{path}: expected to be owned by user {os.geteuid()}, found user {facts.st_uid}; "
            "set XDG_CACHE_HOME to a folder you own"
        )


def _writable_message(path: Path, facts: os.stat_result, remedy: str) -> str:
    mode = stat.S_IMODE(facts.st_mode)
    return f"{path}: expected that nobody else can write there, found mode {mode:o}; chmod {remedy} it"

"""The Certificate: what each step of a checked run left in-core and under the plan, as digests, for a supplement.

Who has the same versions, machine and flags can run the workload plainly and find the same digests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from poochplan.formats.checks.fields import Text
from poochplan.formats.files import read_struct, write_struct
from poochplan.formats.profile_parts import Host

SCHEMA_VERSION = 1


class StepDigests(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step: SHA-256 of dtype, shape and bytes of each tensor, rows in order, by name."""

    loss: Text
    gradients: dict[Text, Text]
    """Before the optimizer's step."""
    buffers: dict[Text, Text]
    """After it, like the two below."""
    parameters: dict[Text, Text]
    generators: dict[Text, Text]
    """State of torch's random number generator of each kind of device."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in-core, the same steps under a plan from the same seed, and whether all digests are equal."""

    kind: Literal["certificate"] = "certificate"
    schema_version: int = SCHEMA_VERSION
    workload: Text
    plan_fingerprint: Text
    """``Plan.fingerprint`` of the plan that was followed."""
    seed: int
    versions: dict[Text, Text]
    host: Host | None = None
    flags: dict[Text, Text]
    """Settings of torch that can change bits."""
    equal: bool
    in_core: tuple[StepDigests, ...]
    planned: tuple[StepDigests, ...]

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the certificate; an existing file is kept unless ``force``."""
        return write_struct(path, self, force=force)

    @classmethod
    def load(cls, path: str | Path) -> Certificate:
        """Reads a certificate; raises :class:`~poochplan.errors.InputFileError` that names what is wrong."""
        return read_struct(path, cls, what="certificate", schema_version=SCHEMA_VERSION)

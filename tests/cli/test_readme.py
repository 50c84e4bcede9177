"""Every `pooch` command of the README is one that the command line takes, and the workloads it names are there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from poochplan.cli import build_parser
from poochplan.workload import shipped_configs

README = Path(__file__).parents[2] / "README.md"
COMMANDS = [line for line in README.read_text().splitlines() if line.startswith("pooch ")]
OF_THE_READER = {"my_network.toml"}
"""Workloads that the README has its reader write."""


def test_the_readme_has_commands() -> None:
    assert {command.split()[1] for command in COMMANDS} >= {"profile", "plan", "run"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_is_understood(command: str) -> None:
    options = build_parser().parse_args(shlex.split(command, comments=True)[1:])
    assert getattr(options, "workload", "unet3d") in shipped_configs().keys() | OF_THE_READER

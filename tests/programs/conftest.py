"""Random programs run on both tapes, in turn."""

from __future__ import annotations

from tests.runtime.tapes import on_tapes, tape_of_sessions

pytest_generate_tests, tape = on_tapes, tape_of_sessions

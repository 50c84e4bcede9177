"""Messages: whatever stands in place of stderr, none raises, and no refusal is hidden while progress is printed."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from poochplan import guard
from poochplan.runtime.messages import Messages, warn
from tests.processes import python, stderr_of

pytestmark = pytest.mark.cpu_device
REFUSAL = "no plan fits the budget"


class Silent:
    """Neither a file nor a terminal."""


class Refusing(io.StringIO):
    def isatty(self) -> bool:
        raise RuntimeError("no terminal is known")

    def write(self, text: str) -> int:
        raise RuntimeError("nothing is written")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def broken_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk() -> io.TextIOWrapper:
    return Path("/dev/full").open("w")


STREAMS = {
    "none": lambda: None,
    "no methods": Silent,
    "closed": closed,
    "broken pipe": broken_pipe,
    "full disk": full_disk,
    "refusing": Refusing,
}


@pytest.fixture(params=STREAMS)
def unusable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    stream = STREAMS[request.param]()
    with monkeypatch.context() as patch, pytest.warns() as told:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(warnings, "showwarning", warnings._showwarning_orig)  # type: ignore[attr-defined]
        warnings.warn("at least one", stacklevel=1)
        yield told
        patch.undo()
    if isinstance(stream, io.TextIOWrapper):
        stream.detach()  # what it holds cannot be written at its end either


@pytest.mark.parametrize("is_quiet", [False, True])
@pytest.mark.parametrize("filters", ["ignore", "always", "error"])
def test_a_stderr_that_cannot_be_written_to_raises_nothing(
    unusable: object, filters: str, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "RAISES", False)
    said = Messages(is_quiet=is_quiet)
    with warnings.catch_warnings():
        warnings.simplefilter(filters)  # type: ignore[arg-type]
        said.say("measuring")
        said.warn(REFUSAL)
        warn("outside a session")
        said.say("planning")
        said.end()


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_stderr_that_is_replaced_meanwhile_gets_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    said, first, second = Messages(is_quiet=False), Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    said.say("measuring the steps")
    monkeypatch.setattr(sys, "stderr", second)
    said.say("planning")
    monkeypatch.setattr(sys, "stderr", None)
    said.say("nobody reads this")
    monkeypatch.setattr(sys, "stderr", first)
    said.say("done")
    said.end()
    assert first.getvalue() == "poochplan: measuring the steps\rpoochplan: done\r\n"
    assert second.getvalue() == f"poochplan: planning{' ' * 11}\n"


def test_a_warning_that_is_ignored_is_a_line_of_its_own_while_progress_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        said = Messages(is_quiet=False)
        for _ in range(2):
            said.say("measuring")
            said.warn(REFUSAL)
        Messages(is_quiet=True).warn("both are asked to be silent")
    assert lines_of(capsys) == ["poochplan: measuring", f"poochplan: {REFUSAL}"]


def test_on_a_terminal_a_refusal_stays_and_progress_goes_on_below(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, said = Terminal(), Messages(is_quiet=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        said.say("measuring")
        said.warn(REFUSAL)
        said.say("planning")
        said.end()
    assert terminal.getvalue() == f"poochplan: measuring\r\npoochplan: {REFUSAL}\npoochplan: planning\r\n"


@pytest.mark.parametrize(
    ("given", "is_line"),
    [
        ({"action": "ignore", "message": "poochplan: no plan"}, True),
        ({"action": "ignore", "message": "another"}, False),
        ({"action": "ignore", "category": RuntimeWarning}, True),
        ({"action": "ignore", "category": UserWarning}, False),
        ({"action": "ignore", "module": __name__.replace(".", r"\.")}, True),
        ({"action": "ignore", "module": "elsewhere"}, False),
        ({"action": "once"}, False),
    ],
    ids=str,
)
def test_a_warning_comes_once_as_a_warning_or_as_a_line(
    given: dict[str, object], is_line: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.filterwarnings(**given)  # type: ignore[arg-type]
        Messages(is_quiet=False).warn(REFUSAL)
    assert lines_of(capsys) == [f"poochplan: {REFUSAL}"] * is_line
    assert [one.filename for one in told] == [__file__] * (not is_line)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_warning_that_is_an_error_is_a_line(
    is_quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "RAISES", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Messages(is_quiet=is_quiet).warn(REFUSAL)
    assert lines_of(capsys) == [f"poochplan: {REFUSAL}"]


DAEMON = """
    import os, sys, tempfile, torch
    {before}
    import poochplan
    import poochplan.guard
    from torch import nn
    poochplan.guard.RAISES = False
    def trained(around):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
        optimizer, found = torch.optim.RMSprop(model.parameters()), []
        with around(model, optimizer):
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(torch.randn(3000, 40)).pow(2).mean()
                {amid}
                loss.backward()
                found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]
                optimizer.step()
        return found
    def session(model, optimizer):
        return poochplan.auto(model, optimizer, budget="80%", cache=tempfile.mkdtemp(), before_plan="swap")
    import contextlib
    plain = trained(lambda *_: contextlib.nullcontext())
    assert all(map(torch.equal, trained(session), plain))
    print("equal")
"""
BEFORE = {
    "no stderr": ("sys.stderr = None", "pass"),
    "a closed one": ("sys.stderr.close()", "pass"),
    "a full disk": (
        # At the end it has room again: else Python 3.13 ends with code 120, whoever wrote the line.
        "import atexit; atexit.register(os.dup2, os.dup(2), 2); os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
        "pass",
    ),
    "a descriptor that is closed, and written to": (
        "sys.stderr = None; os.close(2)",
        "exec('try: os.write(2, bytes(range(256)) * 4096)\\nexcept OSError: pass')",
    ),
}


@pytest.mark.parametrize("kind", BEFORE)
def test_a_loop_without_stderr_trains_with_the_same_bits(kind: str) -> None:
    before, amid = BEFORE[kind]
    assert python(DAEMON.format(before=before, amid=amid)) == "equal\n"


@pytest.mark.parametrize("says", ["Messages(is_quiet=False).say('progress')", "warn('a warning')"])
def test_what_is_said_to_a_closed_descriptor_changes_no_exit_code(says: str) -> None:
    code = f"""
        import os, warnings
        from poochplan.runtime.messages import Messages, warn
        warnings.simplefilter("always")
        os.close(2)
        {says}
        print("end")
    """
    assert python(code, is_fresh=True, PYTHONUNBUFFERED="") == "end\n"  # and ends with 0


@pytest.mark.parametrize("action", ["error", "ignore"])
def test_a_loop_whose_filters_hide_warnings_or_raise_them_says_its_refusal_and_goes_on(action: str) -> None:
    before = f"import warnings; warnings.simplefilter('{action}')"
    code = DAEMON.format(before=before, amid="pass").replace('budget="80%"', "budget=4096")
    code = code.replace("range(4)", "range(14)").replace('"swap"', '"in-core"')
    said = [line for line in stderr_of(code).splitlines() if "no plan fits" in line]
    assert len(said) == 1
    assert said[0].startswith("poochplan: no plan fits the budget of 4.00 KiB: the smallest possible is ")

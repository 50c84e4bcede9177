"""Sources: what a plan may hold in place of larger saved copies, in planner, simulators, bound and plan files."""

from __future__ import annotations

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Kind, Profile
from poochplan.formats.sources import sources_of, with_sources
from poochplan.planner.simulator.evaluator import STYLE_OF
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import swap_all, try_style
from tests.planner.random_profiles import Recorder, link

KEEP, SWAP, RECOMPUTE = Decision


def norm(written: bool = False, name: str = "aten._to_copy.default", opaque: bool = False, widths: int = 2) -> Profile:
    """A residual, its copy that a norm saves, and a layer behind it."""
    r = Recorder()
    (stem,) = r.op("linear", [r.before(4096, Kind.INPUT)], [4096], seconds=1.0, opaque=opaque)
    (wide,) = r.op(name, [stem], [widths * 4096], saves_outputs=True, seconds=0.1)
    (narrow,) = r.op("mul", [wide], [4096], saves=[wide], seconds=0.1)
    if written:
        r.op("add_", [stem], writes=[stem], seconds=0.1)
    r.op("add", [stem, narrow], [512], saves=[narrow], seconds=1.0)
    return r.finish(link(1e-3))


def test_a_source_is_the_smaller_tensor_that_a_cast_or_a_clone_reads() -> None:
    for name in ("aten._to_copy.default", "aten.clone.default"):
        ((_, source),) = sources_of(norm(name=name)).items()
        assert norm().values[source].kind is Kind.TEMPORARY
    assert sources_of(norm(name="aten.relu.default")) == {}


def test_a_source_that_is_written_later_or_is_no_smaller_is_none() -> None:
    assert sources_of(norm(written=True)) == {}
    assert sources_of(norm(widths=1)) == {}


def test_a_copy_can_be_replayed_from_its_source_where_nothing_else_makes_it() -> None:
    assert build_problem(norm(opaque=True)).replay.replays[0] is None
    graph = build_problem(with_sources(norm(opaque=True))).replay
    assert graph.replays[0] is None  # the source itself
    replay = graph.of(1)
    assert (replay.ops, replay.inputs) == ((1,), (0,))


def test_an_idle_source_costs_nothing_whatever_is_decided_about_it() -> None:
    profile = with_sources(norm())
    problem = build_problem(profile)
    for style in STYLE_OF:
        kept = try_style(problem, "", (KEEP, SWAP, SWAP), 0, style)
        swapped = try_style(problem, "", (SWAP, SWAP, SWAP), 0, style)
        assert swapped.schedule == kept.schedule
        assert swap_all(problem)[0] is KEEP

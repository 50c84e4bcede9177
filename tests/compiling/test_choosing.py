"""What is recomputed inside graphs follows from profiles and plans alone."""

from __future__ import annotations

import msgspec
import pytest

from poochplan.compiling.compile import check_options
from poochplan.compiling.rounds import as_measured, beside_in_core, graph_budget, recomputed_nodes
from poochplan.errors import UsageError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Phase, Profile
from poochplan.formats.queries import saved_values
from poochplan.planner.planning import plan, smallest_budget
from tests.planner.tiny_profiles import tiny_profile


def _of_graphs() -> Profile:
    """A profile each of whose saved values a node saves, two of them one node."""
    profile = tiny_profile(0)
    saves = list(saved_values(profile))

    def named(number: int) -> tuple[str, ...]:
        return (f"graph/node_{max(saves.index(number), 1)}",) if number in saves else ()

    values = (msgspec.structs.replace(one, nodes=named(number)) for number, one in enumerate(profile.values))
    return msgspec.structs.replace(profile, values=tuple(values))


def test_recomputed_nodes_are_those_of_the_values_that_the_plan_recomputes() -> None:
    profile = _of_graphs()
    made = plan(profile, smallest_budget(profile), evaluations=50)
    wish = tuple(
        msgspec.structs.replace(one, decision=Decision.RECOMPUTE if place in (0, 1, 3) else Decision.KEEP)
        for place, one in enumerate(made.values)
    )
    found = recomputed_nodes(profile, msgspec.structs.replace(made, values=wish))
    assert found == ("graph/node_1", "graph/node_3")
    kept = tuple(msgspec.structs.replace(one, decision=Decision.SWAP) for one in made.values)
    assert recomputed_nodes(profile, msgspec.structs.replace(made, values=kept)) == ()


def test_ops_of_the_graphs_share_the_seconds_of_the_measured_step() -> None:
    graphs, other = tiny_profile(0), tiny_profile(1)
    times = msgspec.structs.replace(other.times, forward_s=3.0, backward_s=5.0, optimizer_s=0.0)
    found = as_measured(graphs, msgspec.structs.replace(other, times=times, mode="run"))
    for phase, seconds in ((Phase.FORWARD, 3.0), (Phase.BACKWARD, 5.0)):
        assert sum(op.duration_s for op in found.ops if op.phase is phase) == pytest.approx(seconds)
    assert (found.times, found.link, found.mode) == (times, other.link, "run")
    assert found.values == graphs.values


def test_the_graphs_budget_lies_as_far_below_their_peak() -> None:
    graphs, measured = tiny_profile(0), tiny_profile(1)
    budget_bytes = measured.in_core_peak_bytes - 1000
    assert graph_budget(budget_bytes, graphs, measured) == graphs.in_core_peak_bytes - 1000


def test_overhead_is_told_against_the_code_without_the_share_of_its_replays() -> None:
    profile, stock = tiny_profile(0), tiny_profile(1)
    made = plan(profile, profile.in_core_peak_bytes, evaluations=1)
    step_s = made.prediction.in_core_step_s
    for replay_s in (step_s / 4, 3 * step_s):  # of the graphs, whose step is another
        graphs = msgspec.structs.replace(made.prediction, replay_s=replay_s)
        found = beside_in_core(made, stock, graphs).prediction
        assert found.in_core_peak_bytes == stock.in_core_peak_bytes
        assert found.in_core_step_s == pytest.approx(step_s * step_s / (step_s + replay_s))
        assert found.overhead == made.prediction.step_s / found.in_core_step_s - 1
        assert found.replay_s == pytest.approx(made.prediction.replay_s + step_s - found.in_core_step_s)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "eager"}, "expected no backend, found 'eager'"),
        ({"dynamic": True}, "expected no dynamic, found True; graph mode takes one plan for each set of shapes"),
        ({"mode": "reduce-overhead"}, "expected no CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "expected no CUDA graphs"),
        ({"recursive": True}, "expected fullgraph, mode or options, found recursive; leave it out"),
    ],
)
def test_an_option_that_graph_mode_does_not_take_is_one_clear_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_options(options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)

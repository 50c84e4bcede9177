"""Who plans in a function of his own keeps nothing alive by it."""

from __future__ import annotations

from tests.processes import python

SCRIPT = """
    import gc, weakref

    class Model:
        pass

    def trains():
        model = Model()
        import poochplan.planner.search.solvers  # loads the solvers
        return weakref.ref(model)

    seen = trains()
    gc.collect()
    print("gone" if seen() is None else gc.get_referrers(seen()))
"""


def test_what_a_function_holds_that_plans_first_dies_with_it() -> None:
    assert python(SCRIPT, is_fresh=True).strip() == "gone"

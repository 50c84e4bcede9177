"""Verifying: a segment in which values are recomputed and compared with what was saved; originals are what is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from poochplan.formats.plan import Instructions
from poochplan.profiler.trials.compare import verifying
from poochplan.profiler.trials.swap_all import HostStore
from poochplan.profiler.trials.verify_replays import Verify
from poochplan.runtime.engine.cursor import Segment

from .watch import Scene, Watch


class Verifying(Watch):
    """``verify`` has the verdicts."""

    def __init__(self, scene: Scene, instructions: Instructions) -> None:
        self._stores = contextlib.ExitStack()
        self.verify: Verify = verifying(instructions, scene.model, lambda: self._store(scene))
        super().__init__(scene, self.verify)
        self.rebuild = self.verify.rebuild
        self.swaps_once = True

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        self.look_around()
        yield

    def _store(self, scene: Scene) -> HostStore:
        return self._stores.enter_context(contextlib.closing(HostStore(scene.where, scene.spill_dir)))

    def end(self, *, stepped: bool) -> None:
        super().end(stepped=stepped)
        self._stores.close()

"""``pooch`` on ranks: ``python -m tests.forked_ranks COUNT tests.cli.forked ...`` imports once for all of them."""

from __future__ import annotations

import importlib
import sys

from poochplan.cli import main

for name in ("torch.distributed.fsdp", "poochplan.cli.run", "poochplan.verify", "poochplan.runtime.applying"):
    importlib.import_module(name)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

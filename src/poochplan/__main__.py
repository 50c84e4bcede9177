"""``python -m poochplan``: the command line, also for ``torchrun -m poochplan``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

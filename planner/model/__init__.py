"""The integer program: PLAN decides, BOUND proves."""

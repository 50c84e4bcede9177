"""From what was captured and timed to a Profile."""

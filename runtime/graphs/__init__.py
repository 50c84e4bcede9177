"""Graph mode: compiled forwards hand out what they save, and a plan's replays are written into compiled backwards."""

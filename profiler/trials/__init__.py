"""Steps under plans that nobody solved: swapping all, comparing replays, timing the runtime."""

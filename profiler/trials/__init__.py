"""Steps under plans made without a search: swapping all values, comparing replays, timing the runtime."""

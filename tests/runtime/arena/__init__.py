"""The arena's allocator: what it counts, records and serves, and how it is built."""

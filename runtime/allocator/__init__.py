"""The optional compiled part: an allocator for torch on the CPU that counts, records and serves a step's blocks."""

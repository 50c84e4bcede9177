"""The places of a planned step's blocks in one arena, and in a model of PyTorch's caching allocator."""

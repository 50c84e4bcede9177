"""Where the blocks of a planned step would lie in one arena, and in PyTorch's caching allocator."""

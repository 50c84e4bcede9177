"""One arena: the compiled allocator that counts, records and serves blocks, and layouts for steps and forwards."""

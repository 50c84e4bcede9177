"""One arena: the compiled allocator that counts and logs blocks and places them, and layouts for steps and forwards."""

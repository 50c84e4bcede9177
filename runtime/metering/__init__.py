"""Counts live bytes: through the dispatcher, and in compiled regions at the allocator."""

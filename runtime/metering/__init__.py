"""Counts live bytes: through the dispatcher, and in compiled code at the allocator."""

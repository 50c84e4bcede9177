"""What a step takes of the device's allocator beside its values: inside ops, in compiled code, between ops."""

"""A backward whose gradients are used: its nodes as ops, told by hooks on them."""

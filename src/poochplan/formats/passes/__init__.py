"""Files about a forward pass alone."""

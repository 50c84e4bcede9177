"""Facts about torch and its tensors, independent of plans and profiles."""

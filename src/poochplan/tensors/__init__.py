"""Facts about torch and its tensors; nothing here knows of plans or profiles."""

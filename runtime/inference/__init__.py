"""Inference: the blocks of a forward pass without gradients, from one arena."""

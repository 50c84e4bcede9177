"""Facts about torch's tensors, operators and modes; no plan, no profile."""

"""Joint graphs of a compiled model, taken without memory: what is profiled is what the compiler would lower."""

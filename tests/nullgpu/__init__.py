"""A CUDA runtime that is none, for the registry's CUDA build of torch: see README.md."""

"""The largest value of a workload's parameter that trains within a memory: :func:`poochplan.fit` and ``pooch fit``."""

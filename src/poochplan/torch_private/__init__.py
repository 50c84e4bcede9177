"""Every private name of torch that poochplan uses, and its purpose. No other module names one.

torch guarantees none of them: if another version breaks poochplan, look here first. A test enforces this for the rest
of the package. `make test-torch VERSION=...` checks whether a version still has all of them, with the same meaning.
"""

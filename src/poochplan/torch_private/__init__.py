"""Every private name of torch that poochplan stands on, and what each is for. No other module names one.

torch promises nothing about these: when another version breaks, it is here that one looks. A test holds the rest of the
package to it. `make test-torch VERSION=...` tells whether a version still has them all, and that they mean the same.
"""

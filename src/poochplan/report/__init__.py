"""Tables, frames by layer, memory curves and timelines of profiles, plans and runs.

This package never imports torch, and loads matplotlib and pandas only in the modules that need them.
"""

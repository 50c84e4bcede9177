"""What a person looks at: tables, per-layer frames, memory curves and timelines of profiles, plans and runs.

Nothing here decides or measures; torch is never imported, matplotlib and pandas only by the modules that need them.
"""

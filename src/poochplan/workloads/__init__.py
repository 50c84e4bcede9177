"""Ready workloads: functions that return a :class:`poochplan.Workload`, built with widely used libraries.

They need ``pip install 'poochplan[workloads]'`` (the two in :mod:`.sequence` only need torch), and no network. They are
repeatable: ``seed`` fixes the weights, the data and, through torch's global generator, the first step's dropout. The
batch is made once, so every step has the same data.
"""

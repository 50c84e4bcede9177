"""Ready workloads: functions that return a :class:`poochplan.Workload`, built from the libraries people use.

They need ``pip install 'poochplan[workloads]'`` (the two in :mod:`.sequence` need torch alone), read nothing from the
network, and are repeatable: ``seed`` fixes the weights, the data and, through torch's global generator, the first
step's dropout. The batch is made once, so every step sees the same data.
"""

"""Compiled code whose saved tensors can be moved: the ops that are inserted into Inductor's graphs, and their code.

Inductor's own partitioner splits a joint graph into a forward and a backward. Ours (``partitioner.py``) calls it and
then adds ops to both. ``inductor.py`` installs it in one of two ways:

* *Compiled blocks* of an eager model, in a session or a profile: each backward gets a **deferred unpack** before the
  first use of each saved tensor. When the backward begins, autograd hands out a **placeholder** without memory for the
  tensor.
* *Graph mode* (``poochplan.compile``): the forward also gets a **save point** after each node that it saves, and the
  backward gets the replays of a plan (``rewriting.py``). A capture without memory has the same graphs, and no code.
"""

from __future__ import annotations

from poochplan.runtime.compiled_hooks import CompiledHooks

from .deferred_unpack import deferring, plainly
from .inductor import capturing_graphs, compiled_deferring, why_none_deferred, written_replays
from .points import told_of_points

HOOKS = CompiledHooks(
    deferring, plainly, compiled_deferring, why_none_deferred, told_of_points, written_replays, capturing_graphs
)

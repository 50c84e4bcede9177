"""Compiled code whose saved tensors can be moved: what is put into Inductor's graphs, and what runs there.

Inductor's own partitioner splits a joint graph into a forward and a backward; ours (``partitioner.py``) calls it and
then adds ops to both. ``inductor.py`` sets ours, by one of two ways in:

* *Compiled blocks* of an eager model, in a session or a profile: each backward gets a **deferred unpack** before the
  first use of each saved tensor. At its begin autograd hands out a **placeholder** without memory for it.
* *Graph mode* (``poochplan.compile``): the forward also gets a **save point** behind each node that it saves, and the
  backward the replays of a plan (``rewriting.py``).

``points.py`` has the two ops, ``deferred_unpack.py`` the placeholders and the hooks that give them. The
partitioner says where a deferred unpack stays put so that fusion, and with it every bit, is that of stock Inductor.
"""

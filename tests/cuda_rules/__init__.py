"""CUDA's rules without a GPU: a machine in host memory on which the CUDA device's own lines run, late and watched.

It takes the place of the names of ``torch.cuda`` that the product uses (``machine.on_stand_in``). Nothing of the
product knows of it: ``tensor.device`` says ``cuda:0``, and the same modules run that run on a GPU.

* ``streams``: queues, first in first out; queued copies run as late as events, synchronisation, reads and ops allow.
  A vector clock tells of any two accesses that no event orders, whatever order they happened to run in.
* ``memory``: a caching allocator that hands freed blocks out at once, with NaN in them.
* ``host_memory``: pinned ranges, the driver's calls that pin them, and what CuPy offers.
* ``rules``: a dispatch mode below all others. Places results on the device, and refuses to mix devices.
* ``tensors``: what tensors say of themselves.
* ``backward``: autograd's device thread, and the streams on which its nodes run.

Ops run at once, as on a GPU that is never behind: what is late are copies. That copies may also come too early the
clocks tell.
"""

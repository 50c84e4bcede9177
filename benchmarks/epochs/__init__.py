"""Recurrent networks over an epoch: what ``benchmarks/char_rnn.py`` is made of."""

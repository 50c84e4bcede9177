"""The simulator, compiled: what decisions give, to the bit, in a fraction of a millisecond."""

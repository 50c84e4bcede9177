"""The user's step, run under observation and left as it was found."""

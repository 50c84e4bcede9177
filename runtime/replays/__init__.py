"""Recording the ops of forward, and running them again."""

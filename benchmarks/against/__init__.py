"""Our plans against what a user would pick instead: networks, methods, processes that take turns, rows, table."""

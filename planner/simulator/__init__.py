"""The referee: what a schedule does to memory and to time."""

"""Plans of a running loop: made by another process, kept in the cache, in force by kind of segment."""

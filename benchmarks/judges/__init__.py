"""Judges that nobody here wrote: torch's own databases of samples, held against sessions."""

"""What each step takes, beside what was promised: the census, the meter's schedule, and who holds an excess."""

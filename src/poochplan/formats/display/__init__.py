"""What a profile, a plan or a report shows of itself, in a notebook and in a terminal."""

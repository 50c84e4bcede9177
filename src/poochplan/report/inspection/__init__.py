"""What files of this package say, for a person: one alone, two beside each other, a step over time."""

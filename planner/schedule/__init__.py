"""From decisions to a schedule: what happens at which point of the step."""

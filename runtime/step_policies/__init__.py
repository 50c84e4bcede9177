"""Who decides what happens to saved values, and when: a plan's course, or a policy that needs none."""

"""Who decides what happens to saved values, and when: the plan that a step follows, or a policy that needs none."""

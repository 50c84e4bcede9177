"""Online: profiles, plans and follows inside a running training loop."""

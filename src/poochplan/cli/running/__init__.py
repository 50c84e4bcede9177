"""``pooch run``."""

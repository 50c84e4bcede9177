"""The types of profiles and plans, and queries on them. Never imports torch."""

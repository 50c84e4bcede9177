"""What profiles and plans are, and what can be asked of them. Never imports torch."""

"""The link between device and host: measured, fitted, and remembered."""

"""The rows of the fluid models PLAN and BOUND, one group a file."""

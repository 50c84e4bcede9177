"""Building C++ that ships as source: what the compiled parts of planner and runtime share. No torch."""

"""A compiled step without memory: its graphs run node by node, so what is profiled is what would be lowered."""

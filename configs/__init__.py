"""The workloads that come with poochplan: one TOML each, which `pooch` finds by its name alone."""

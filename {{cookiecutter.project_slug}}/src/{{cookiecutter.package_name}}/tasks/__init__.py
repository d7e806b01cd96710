"""Your models and your data. Nothing here needs to be registered."""

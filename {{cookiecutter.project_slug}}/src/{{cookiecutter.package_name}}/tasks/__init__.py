"""What is trained: your models and your data. Nothing here needs to be registered."""

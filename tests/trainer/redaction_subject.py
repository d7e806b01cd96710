"""A model with options whose names say that they are secret; for test_redaction.py."""

from my_project.tasks.image_classifier import ImageClassifier


class Secretive(ImageClassifier):
    """Takes a token, and does nothing with it."""

    def __init__(self, token: str = "", pin_key: int = 0, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)

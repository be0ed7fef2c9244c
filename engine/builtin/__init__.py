"""Holds the built-in models, which are served without a download."""

from pathlib import Path

BUILTIN_FOLDERS = {
    "builtin": Path(__file__).parent / "target",
    "builtin-classifier": Path(__file__).parent / "cross_encoder",
}
"""Folders by `model.path`."""

"""Imports the model library for its tokenizers alone."""

import os
import sys


def import_without_torch() -> None:
    """Imports transformers as if torch were not installed.

    Its tokenizers do not need torch, and its loader of tokenizers imports it where it finds it: 400 MB and seconds. The
    library has no models in this process from then on, so this is for one that never computes with a model. Where
    torch is imported already, nothing is done.
    """
    if "torch" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there are no models
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's sign of a module that cannot be imported
    try:
        from transformers import AutoTokenizer
    finally:
        del sys.modules["torch"]
    del AutoTokenizer  # it is imported for what its import leaves

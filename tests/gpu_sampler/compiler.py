"""Triton's compiler, which needs no GPU; with TRITON_INTERPRET=1 a process has none."""

import importlib.util
import os

import pytest

COMPILES = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
CAPABILITY = 90  # of the card that tests compile for

needs_compiler = pytest.mark.skipif(not COMPILES, reason="needs Triton that compiles")
warns_of_fusion = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")

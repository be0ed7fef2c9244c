"""Tokenizers without torch: the same ids, names and texts, in a process that imports no torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.model.model_folder import BUILTIN

TEXTS = ["a red chair", " ", "", "ünïcode \U0001f600", "<|end|> <think>", "x" * 300, "1 2  3\n\n4\t"]
SCRIPT = """
import json, sys
from engine.tokenizer.library import import_without_torch
from engine.tokenizer.tokenizer import load_tokenizer
given = json.load(sys.stdin)
if given["without"]:
    import_without_torch()
tokenizer = load_tokenizer(given["path"])
ids = tokenizer.encode_batch(given["texts"], add_special_tokens=True)
frame = tokenizer.pair_frame
print(json.dumps({
    "torch": "torch" in sys.modules,
    "ids": ids,
    "texts": [tokenizer.decode(one, skip_special_tokens=False) for one in ids],
    "frame": frame and frame._asdict(),
    "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id],
    "special": sorted(tokenizer.special_texts),
    "info": repr(tokenizer._info),
}, default=str))
"""


def told(path: str, without: bool) -> Any:
    given = json.dumps({"path": path, "texts": TEXTS, "without": without})
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PyTorch was not found" not in done.stderr
    return json.loads(done.stdout)


def unnamed(folder: Path) -> str:
    """A copy of the built-in model that names no class: the library takes its configuration's."""
    shutil.copytree(BUILTIN, folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8"))
    del settings["tokenizer_class"]
    file.write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.full
@pytest.mark.parametrize("path", ["builtin", "builtin-classifier", None])
def test_a_tokenizer_without_torch_is_the_same(path: str | None, tmp_path: Path) -> None:
    path = path or unnamed(tmp_path / "model")
    alone, beside = told(path, True), told(path, False)
    assert (alone.pop("torch"), beside.pop("torch")) == (False, True)
    assert alone == beside and any(map(len, alone["ids"]))

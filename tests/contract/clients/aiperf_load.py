"""AIPerf over streamed completions. Arguments: url, tokenizer (a folder), requests, tokens."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REVISION = "0" * 40


def cached(tokenizer: Path, home: Path) -> str:
    """Puts a tokenizer into a cache of the hub, where alone AIPerf looks without a network; returns its name."""
    model = home / "hub" / "models--assay--builtin"
    shutil.copytree(tokenizer, model / "snapshots" / REVISION)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    return "assay/builtin"


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        name = cached(Path(arguments["tokenizer"]), Path(folder) / "cache")
        out = Path(folder) / "out"
        options = {
            "--model": "builtin", "--url": arguments["url"], "--endpoint-type": "completions", "--tokenizer": name,
            "--concurrency": 2, "--request-count": arguments["requests"], "--isl": 16, "--osl": arguments["tokens"],
            "--extra-inputs": "ignore_eos:true", "--artifact-dir": out, "--ui": "none",
        }  # fmt: skip
        command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--streaming"]
        command += [str(part) for pair in options.items() for part in pair]
        environment = os.environ | {"HF_HOME": str(Path(folder) / "cache"), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment, cwd=folder)
        [found] = out.rglob("profile_export_aiperf.json")
        answer.write_text(found.read_text("utf-8"), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""GuideLLM over streamed completions. Arguments: url, tokenizer (a folder), requests, tokens."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = {
            "--backend": f"kind=openai_http,target={arguments['url']},model=builtin,request_format=/v1/completions",
            "--profile": "kind=concurrent,streams=2",
            "--constraint": f"kind=max_requests,count={arguments['requests']}",
            "--tokenizer": f"kind=huggingface_auto,model={arguments['tokenizer']}",
            "--data": f"kind=synthetic_text,prompt_tokens=16,output_tokens={arguments['tokens']}",
            "--output": f"kind=json,path={out}",
        }
        command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-progress"]
        subprocess.run([*command, *(part for pair in options.items() for part in pair)], check=True, cwd=folder)
        [benchmark] = json.loads(out.read_text("utf-8"))["benchmarks"]
    answer.write_text(json.dumps(benchmark["metrics"]), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

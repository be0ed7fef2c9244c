"""python -m deployments.serving CONFIG: a local Ray without a dashboard, then `serve run CONFIG` until interrupted.

Starts and ends only what is its own: `ray stop` would end every Ray process of the machine.
"""

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import FrameType

import yaml

OBJECT_STORE_BYTES = 128 * 1024 * 1024
POLL_S = 0.5
# Ray reads these when it is imported and hands them to every process that it starts.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
QUESTION = {  # in the built-in model's own form
    "query": "Query: a red chair from Lisbon\nDocument: ",
    "items": [
        "A pine chair for reading, sturdy and red, made in Lisbon.\nRelevant:",
        "A pine chair for reading, sturdy and blue, made in Lisbon.\nRelevant:",
    ],
    "labels": [" yes", " no"],
}


def main(arguments: list[str]) -> int:
    """Returns when interrupted, or at once where the config cannot be read."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print("usage: python -m deployments.serving CONFIG.yaml", file=sys.stderr)
        return 2
    config = Path(arguments[0])
    url = url_of(yaml.safe_load(config.read_text("utf-8")))
    if taken(url):
        print(f"{url} is taken by another process: change http_options.port in {config}.", file=sys.stderr)
        return 1
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    _run(config, url)
    return 0


def _run(config: Path, url: str) -> None:
    import ray
    from ray.serve.scripts import cli

    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        num_cpus=max(4, os.cpu_count() or 1),  # logical: a small machine must still place every actor
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which sets its own; a shell may ignore SIGINT
        signal.signal(number, _interrupt)
    threading.Thread(target=announce, args=(url,), name="announce", daemon=True).start()
    try:
        cli.main(["run", str(config)], standalone_mode=False)
    except SystemExit:
        pass  # how `serve run` ends after an interrupt
    finally:
        ray.shutdown()


def url_of(config: object) -> str:
    """Where the first application of a Serve config answers, from this machine."""
    found = config if isinstance(config, dict) else {}
    http = found.get("http_options") or {}
    prefix = (found.get("applications") or [{}])[0].get("route_prefix") or "/"
    host = http.get("host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{http.get('port', 8000)}{prefix.rstrip('/')}"


def taken(url: str) -> bool:
    """Whether somebody listens there: Serve would start all the same, and share the port or wait."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((parts.hostname or "127.0.0.1", parts.port or 80)) == 0


def announce(url: str) -> None:
    """Waits until /readyz answers 200, then says where and how to ask."""
    started = time.monotonic()
    while not ready(url):
        time.sleep(POLL_S)
    print(
        f"\nReady after {time.monotonic() - started:.0f} s at {url}\n"
        f"  curl {url}/generative_scoring -H 'content-type: application/json' -d '{json.dumps(QUESTION)}'\n",
        flush=True,
    )


def ready(url: str) -> bool:
    """Whether /readyz answers 200 now. No proxy of the environment is asked: the server is on this machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

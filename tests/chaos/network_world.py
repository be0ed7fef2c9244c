"""Run inside an empty network namespace: starts the service from a config and says what it saw, as JSON.

`python network_world.py CONFIG PORT SECRET KEYS_FILE [bare]`: KEYS_FILE is rewritten once the service is up. `bare`:
Serve alone starts it, without our own command's checks.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

START_S = 420  # of a machine that does much else
LISTEN = "0A"
BARE = """
import sys
import ray
import yaml
from ray import serve
from deployments.app import build
from deployments.config.app_args import AppArgs
ray.init(address="local", include_dashboard=False, object_store_memory=100_000_000, num_cpus=8)
config = yaml.safe_load(open(sys.argv[1]))
serve.start(proxy_location="HeadOnly", http_options=config["http_options"])
try:
    serve.run(build(AppArgs.model_validate(config["applications"][0]["args"])), blocking=True)
except RuntimeError:
    print(serve.status().applications["default"].deployments["Ingress"].message)
"""


def main(config: str, port: int, secret: str, keys_file: str, bare: bool) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    command = ["-c", BARE, config] if bare else ["-m", "deployments.cli", "serve", config]
    server = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found: dict[str, object] = {"reachable": outside()}
    try:
        found["ready"] = wait_ready(server, port)
        if found["ready"]:
            found["listeners"] = listeners()
            found["routes"] = routes(port, secret)
            found["raw"] = {name: raw(port, data) for name, data in attacks(secret).items()}
            found["after"] = status(port, "/v1/models", secret)
            Path(keys_file + ".new").write_text('{"keys": []}')
            os.replace(keys_file + ".new", keys_file)
            found["revoked"] = revoked(port, secret)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            output, _ = server.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            output, _ = server.communicate()
    found["output"] = output.decode(errors="replace")
    print(json.dumps(found))


def outside() -> bool:
    """Whether anything but this namespace can be reached."""
    try:
        with socket.create_connection(("192.0.2.1", 80), timeout=1):
            return True
    except OSError:
        return False


def wait_ready(server: "subprocess.Popen[bytes]", port: int) -> bool:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        if status(port, "/readyz") == 200:
            return True
        time.sleep(0.5)
    return False


def status(port: int, path: str, secret: str | None = None, body: bytes | None = None) -> int:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {secret}"} if secret else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def routes(port: int, secret: str) -> dict[str, list[int]]:
    """Statuses without a key, with a wrong one and with the right one."""
    bodies: dict[str, bytes | None] = {
        "/v1/completions": b'{"prompt": "a", "max_tokens": 2}',
        "/v1/score": b'{"query": "a", "items": ["b"], "label_token_ids": [1]}',
        "/metrics": None,
        "/openapi.json": None,
        "/v1/models": None,
    }
    return {path: [status(port, path, key, body) for key in (None, "wrong", secret)] for path, body in bodies.items()}


def attacks(secret: str) -> dict[str, bytes]:
    """Requests that no client library would make; none has the right key but those that are said to."""
    host = b"Host: a\r\n"
    key = b"Authorization: Bearer " + secret.encode() + b"\r\n"
    json_type = b"Content-Type: application/json\r\n"
    body = b'{"prompt": "a", "max_tokens": 1}'
    length = b"Content-Length: %d\r\n" % len(body)
    return {
        "whole address": b"GET http://a/healthz/../v1/models HTTP/1.1\r\n" + host + b"\r\n",
        "odd host": b"GET /v1/models HTTP/1.1\r\nHost: a/healthz?\r\n\r\n",
        "two hosts": b"GET /v1/models HTTP/1.1\r\n" + host + b"Host: b/healthz\r\n\r\n",
        "double slash": b"GET //v1/models HTTP/1.1\r\n" + host + b"\r\n",
        "dots": b"GET /healthz/../v1/models HTTP/1.1\r\n" + host + b"\r\n",
        "encoded dots": b"GET /healthz/%2e%2e/v1/models HTTP/1.1\r\n" + host + b"\r\n",
        "encoded name": b"GET /v1/%6dodels HTTP/1.1\r\n" + host + b"\r\n",
        "1 MB key": b"GET /v1/models HTTP/1.1\r\n" + host + b"Authorization: Bearer " + b"k" * (1 << 20) + b"\r\n\r\n",
        "no ASCII": b"GET /v1/models HTTP/1.1\r\n" + host + b"Authorization: Bearer \xff\xfe\r\n\r\n",
        "a header folded": b"GET /v1/models HTTP/1.1\r\n" + host + b"X: a\r\n Authorization: Bearer x\r\n\r\n",
        "OPTIONS": b"OPTIONS * HTTP/1.1\r\n" + host + b"\r\n",
        "web socket": b"GET /v1/models HTTP/1.1\r\n" + host + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        "another request in the body": b"POST /healthz HTTP/1.1\r\n" + host + b"Content-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n" + host + b"\r\n",
        "with the key: negative length": b"POST /v1/completions HTTP/1.1\r\n" + host + key + json_type
        + b"Content-Length: -1\r\n\r\n" + body,
        "with the key: two lengths": b"POST /v1/completions HTTP/1.1\r\n" + host + key + json_type
        + b"Content-Length: 3\r\n" + length + b"\r\n" + body,
        "with the key: compressed": b"POST /v1/completions HTTP/1.1\r\n" + host + key + json_type
        + b"Content-Encoding: gzip\r\n" + length + b"\r\n" + body,
        "with the key: 300 headers": b"POST /v1/completions HTTP/1.1\r\n" + host + key + json_type
        + b"".join(b"X-%d: a\r\n" % n for n in range(300)) + length + b"\r\n" + body,
        "with the key: no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n",
    }  # fmt: skip


def raw(port: int, data: bytes) -> list[int]:
    """Statuses of everything that is answered on one connection; 0 where it is closed without a word."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as wire:
        received = b""
        try:
            wire.sendall(data)
            wire.settimeout(3)
            while part := wire.recv(65_536):
                received += part
        except OSError:
            pass
    return [int(line.split(b" ")[1]) for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.")] or [0]


def revoked(port: int, secret: str) -> bool:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if status(port, "/v1/models", secret) == 401:
            return True
        time.sleep(0.2)
    return False


def listeners() -> list[str]:
    """Addresses and ports on which anybody in this namespace listens."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == LISTEN:
                address, port = local.split(":")
                data = bytes.fromhex(address)
                words = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
                family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
                found.add(f"{socket.inet_ntop(family, words)} {int(port, 16)}")
    return sorted(found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:] == ["bare"])

"""The local runner: where it says the service is, and that it says so only when it is ready."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.launch import local_serve, ray_env


@pytest.mark.parametrize(
    ("config", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"http_options": {"host": "0.0.0.0", "port": 81}}, "http://127.0.0.1:81"),
        ({"http_options": {"host": "10.0.0.3"}, "applications": [{"route_prefix": "/a"}]}, "http://10.0.0.3:8000/a"),
        ({"applications": [{"route_prefix": "/"}]}, "http://127.0.0.1:8000"),
        ({"http_options": {"host": "::"}}, "http://127.0.0.1:8000"),
        ({"http_options": {"host": "::1", "port": 81}}, "http://[::1]:81"),
    ],
)
def test_the_url_is_that_of_the_config(config: dict[str, Any], url: str) -> None:
    assert local_serve.url_of(config) == url


def test_a_missing_config_is_an_error_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert local_serve.main(["no-such-file.yaml"]) == 2
    assert local_serve.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other server's /readyz would be announced as ours."""
    monkeypatch.setattr(local_serve.LocalService, "run", lambda local: pytest.fail("it was started"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = tmp_path / "config.yaml"
        config.write_text(f"http_options: {{port: {other.getsockname()[1]}}}")
        assert local_serve.main([str(config)]) == 1
    assert "is taken" in capsys.readouterr().err


CPU = Path(local_serve.__file__).parents[2] / "configs" / "cpu.yaml"


def test_a_config_without_a_host_is_served_on_this_machine_alone(tmp_path: Path) -> None:
    """Serve's own default for a config file is every interface."""
    config = tmp_path / "config.yaml"
    config.write_text("applications: []\nhttp_options: {port: 81}")
    assert local_serve.read(config)["http_options"] == {"host": "127.0.0.1", "port": 81}
    config.write_text("applications: []\nhttp_options: {host: 0.0.0.0}")
    assert local_serve.read(config)["http_options"]["host"] == "0.0.0.0"


@pytest.mark.parametrize("text", ["- a list", "a: [", "\ud800".encode("utf-8", "surrogatepass")])
def test_what_is_no_config_is_refused(text: str | bytes, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(local_serve.CannotServe, match="must be"):
        local_serve.read(config)


def test_fast_mode_is_refused_without_rays_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas unpickle what arrives on a port of every interface; the token is the only guard."""
    monkeypatch.setattr(local_serve, "taken", lambda url: False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    local = local_serve.LocalService(config=local_serve.read(CPU), name="cpu.yaml", fast=True)
    with pytest.raises(local_serve.CannotServe, match="RAY_AUTH_MODE"):
        local.refuse()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    local.refuse()
    monkeypatch.delenv("RAY_AUTH_MODE")
    local.refuse()


@pytest.mark.parametrize("fast", [False, True])
def test_the_environment_is_set_before_ray_and_its_folder_goes_with_it(fast: bool, tmp_path: Path) -> None:
    """In a process of its own: Ray must not have been imported."""
    script = f"""
import json, os, sys
from pathlib import Path
from deployments.cli.launch import local_serve
local = local_serve.LocalService(config=local_serve.read(Path({str(CPU)!r})), name="cpu", fast={fast})
with local.prepared() as folder:
    mode = oct(folder.stat().st_mode)
print(json.dumps([dict(os.environ), str(folder), mode, folder.exists(), "ray" in sys.modules]))
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    planted = clean | {"RAY_SERVE_HAPROXY_SOCKET_PATH": "/tmp/somebody-elses.sock"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=planted)
    found, folder, mode, exists, imported = json.loads(done.stdout)
    assert (mode, exists, imported) == ("0o40700", False, False)
    assert len(found["RAY_AUTH_TOKEN"]) == 64 and found["RAY_AUTH_MODE"] == "token"
    assert found["RAY_worker_niceness"] == "0"
    assert (found.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == "1") is fast
    names = ("CONFIG_FILE_LOC", "SOCKET_PATH", "SERVER_STATE_BASE", "SERVER_STATE_FILE", "METRICS_SOCKET_PATH")
    assert all(found.get(f"RAY_SERVE_HAPROXY_{name}", "").startswith(folder) is fast for name in names)


def test_an_environment_that_comes_too_late_is_an_error() -> None:
    import ray  # noqa: F401

    with pytest.raises(RuntimeError, match="before Ray"):
        ray_env.adopt({})


def test_a_wrong_config_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_env, "adopt", lambda wanted: None)
    monkeypatch.setattr(local_serve, "_serve", lambda config, url: pytest.fail("it was started"))
    monkeypatch.setattr(local_serve, "taken", lambda url: False)
    config = tmp_path / "config.yaml"
    config.write_text(CPU.read_text("utf-8").replace("max_running", "max_runing"))
    assert local_serve.main([str(config)]) == 1
    assert "Did you mean `max_running`?" in capsys.readouterr().err


def test_it_announces_once_ready_and_not_before(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(local_serve, "POLL_S", 0.01)
    answers = [503, 503, 200]
    asked: list[str] = []

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert not capsys.readouterr().out
            asked.append(self.path)
            self.send_response(answers[len(asked) - 1])
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        local_serve.announce(url)
        server.shutdown()
        thread.join()
    assert asked == ["/readyz"] * 3
    out = capsys.readouterr().out
    assert f"curl {url}/generative_scoring" in out

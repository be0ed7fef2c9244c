"""The local runner: where it says the service is, and that it says so only when it is ready."""

import http.server
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from deployments import serving


@pytest.mark.parametrize(
    ("config", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"http_options": {"host": "0.0.0.0", "port": 81}}, "http://127.0.0.1:81"),
        ({"http_options": {"host": "10.0.0.3"}, "applications": [{"route_prefix": "/a"}]}, "http://10.0.0.3:8000/a"),
        ({"applications": [{"route_prefix": "/"}]}, "http://127.0.0.1:8000"),
    ],
)
def test_the_url_is_that_of_the_config(config: dict[str, Any], url: str) -> None:
    assert serving.url_of(config) == url


def test_a_missing_config_is_an_error_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["no-such-file.yaml"]) == 2
    assert serving.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other server's /readyz would be announced as ours."""
    monkeypatch.setattr(serving, "_run", lambda config, url: pytest.fail("it was started"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = tmp_path / "config.yaml"
        config.write_text(f"http_options: {{port: {other.getsockname()[1]}}}")
        assert serving.main([str(config)]) == 1
    assert "is taken" in capsys.readouterr().err


def test_it_announces_once_ready_and_not_before(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(serving, "POLL_S", 0.01)
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
        serving.announce(url)
        server.shutdown()
        thread.join()
    assert asked == ["/readyz"] * 3
    out = capsys.readouterr().out
    assert f"curl {url}/generative_scoring" in out

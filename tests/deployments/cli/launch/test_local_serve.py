"""The local runner: where it says the service is, and that it says so only when it is ready."""

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
)

from deployments.cli.check import document
from deployments.cli.launch import local_serve, ray_env
from deployments.cli.launch.model_check import ModelCheck
from deployments.limits import WireLimits
from engine.model.model_folder import BUILTIN
from tests.support import model_folders
from tests.support.ports import free_port


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
    assert next(iter(local_serve.urls_of(config).values())) == url


def test_every_application_has_its_url() -> None:
    applications = [{"name": "a", "route_prefix": "/a"}, {"name": "b", "route_prefix": "/b"}]
    urls = {"a": "http://127.0.0.1:8000/a", "b": "http://127.0.0.1:8000/b"}
    assert local_serve.urls_of({"applications": applications}) == urls


def test_a_date_that_there_is_not_is_an_error_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("applications: [{args: {auth: {keys: [{expires: 2027-02-30T00:00:00Z}]}}}]")
    assert local_serve.serve(file) == 1
    assert f"{file} must be a readable YAML file: day is out of range" in capsys.readouterr().err
    with pytest.raises(document.Unreadable, match="day is out of range"):
        document.read(file)


def test_another_server_on_the_port_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"SSH-2.0-other\r\n")
                connection.recv(1 << 16)

        thread = threading.Thread(target=speak)
        thread.start()
        assert not local_serve.answers(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def test_a_missing_config_is_an_error_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert local_serve.serve(Path("no-such-file.yaml")) == 1
    assert "must be a readable YAML file" in capsys.readouterr().err


def test_an_interrupt_before_the_start_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(local: local_serve.LocalService) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_serve.LocalService, "run", interrupted)
    monkeypatch.setattr(local_serve, "taken", lambda url: False)
    assert local_serve.serve(CPU) == 0


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
        assert local_serve.serve(config) == 1
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("applications: {name: assay}", "applications: Input should be a valid list."),
        ("applications: 5", "applications: Input should be a valid list. Given: 5."),
        ("http_options: 8000", "http_options: Input should be a valid dictionary"),
        ("http_options: {port: 80a}\napplications: []", "http_options.port: Input should be a valid integer"),
        (
            "http_options: {port: 99999}\napplications: []",
            "http_options.port: A port must be in [1, 65535]. Given: 99999.",
        ),
        ("applications: [{route_prefix: 5}]", "applications[0].route_prefix: Input should be a valid string"),
    ],
)
def test_a_value_of_a_wrong_kind_is_named(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_env, "adopt", lambda wanted: None)
    monkeypatch.setattr(local_serve, "_serve", lambda *given: pytest.fail("it was started"))
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert local_serve.serve(config) == 1
    assert words in capsys.readouterr().err


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("model", "errors"),
    [({"path": "toy"}, 0), ({"path": "models/none"}, 1)],
)
def test_models_are_checked_in_a_process_of_its_own(model: dict[str, str], errors: int) -> None:
    config = local_serve.read(CPU)
    config["applications"][0]["args"]["model"] = model
    check = ModelCheck(config)
    try:
        found = check.errors()
        assert len(found) == errors and all("models/none" in one for one in found)
        assert not Path(f"/proc/{check._process.pid}").exists()  # nothing of it is left beside the service
    finally:
        check.stop()


def test_a_check_that_dies_is_an_error() -> None:
    check = ModelCheck(local_serve.read(CPU))
    check._process.kill()
    assert check.errors() == ["error: the check of the model ended with status -9."]
    check.stop()


@pytest.mark.full
def test_an_interrupt_that_the_check_gets_too_does_not_end_it() -> None:
    check = ModelCheck(local_serve.read(CPU))
    pid = check._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)  # while Python starts in it
    assert check.errors() == []
    assert check._process.exitcode == 0
    check.stop()


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


@pytest.mark.full(keep=1)
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
    assert int(found["RAY_max_direct_call_object_size"]) > WireLimits().max_answer_bytes
    assert (found.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == "1") is fast
    assert log_buffer_of(found) == 1
    planted = {name: value for name, value in found.items() if name != "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE"}
    assert log_buffer_of(planted) == (1_000 if fast else 1), "what Serve does of its own"
    names = ("CONFIG_FILE_LOC", "SOCKET_PATH", "SERVER_STATE_BASE", "SERVER_STATE_FILE", "METRICS_SOCKET_PATH")
    assert all(found.get(f"RAY_SERVE_HAPROXY_{name}", "").startswith(folder) is fast for name in names)


def log_buffer_of(environment: dict[str, str]) -> int:
    """Lines that Serve keeps back from the log file of a replica or an ingress."""
    script = "from ray.serve._private.constants import RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE as n; print(n)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


def test_an_environment_that_comes_too_late_is_an_error() -> None:
    import ray  # noqa: F401

    with pytest.raises(RuntimeError, match="before Ray"):
        ray_env.adopt({})


def test_a_wrong_config_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_env, "adopt", lambda wanted: None)
    monkeypatch.setattr(local_serve, "_serve", lambda *given: pytest.fail("it was started"))
    monkeypatch.setattr(local_serve, "taken", lambda url: False)
    config = tmp_path / "config.yaml"
    config.write_text(CPU.read_text("utf-8").replace("max_running", "max_runing"))
    assert local_serve.serve(config) == 1
    assert "Did you mean `max_running`?" in capsys.readouterr().err


def status(state: str, message: str = "", **deployments: tuple[str, str]) -> ApplicationStatusOverview:
    """What Serve's controller says of an application."""
    parts = {
        name: DeploymentStatusOverview(
            status=DeploymentStatus(one), status_trigger=DeploymentStatusTrigger.UNSPECIFIED, message=text,
            replica_states={},
        )
        for name, (one, text) in deployments.items()
    }  # fmt: skip
    return ApplicationStatusOverview(
        status=ApplicationStatus(state), message=message, last_deployed_time_s=0.0, deployments=parts
    )


def no_call() -> None:
    raise AssertionError("not every application answers")


class Interrupted(Exception):
    """Ends what waits for an interrupt."""


def test_each_application_is_announced_once_ready_and_not_asked_before_it_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve logs a look that it cannot answer yet as a client that left."""
    asked: list[str] = []
    called: list[int] = []
    answers = [503, 503, 200, 404]

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert not capsys.readouterr().out
            asked.append(self.path)
            self.send_response(answers[len(asked) - 1])
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    states = iter(["NOT_STARTED", "DEPLOYING", "DEPLOYING", "RUNNING", "RUNNING", "RUNNING"])
    seen: list[int] = []

    def statuses() -> dict[str, ApplicationStatusOverview]:
        seen.append(len(asked))
        return {"a": status(next(states))}

    def sleep(seconds: float) -> None:
        if seconds == local_serve.IDLE_S:
            raise Interrupted

    monkeypatch.setattr(time, "sleep", sleep)
    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(Interrupted):
            local_serve.follow(statuses, {"a": url}, "cpu.yaml", lambda: called.append(len(asked)))
        server.shutdown()
        thread.join()
    assert called == [4]
    assert asked == [*["/readyz"] * 3, "/v1/models"] and seen == [0, 0, 0, 0, 1, 2]
    assert f"curl {url}/v1/models\n" in capsys.readouterr().out


TRACEBACK = """The deployment failed to start 1 times in a row. Error:
\x1b[36mray::ServeReplica:a:Replica.initialize_and_get_metadata()\x1b[39m (pid=1, ip=10.0.0.1)
  File "replica.py", line 1, in initialize
RuntimeError: Traceback (most recent call last):
  File "loader.py", line 58, in load_model
    module = read_model(folder)
engine.model.checkpoint_audit.BadCheckpoint: /m/model.safetensors is a git-lfs pointer: run `git lfs pull`.
"""


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            status(
                "DEPLOY_FAILED", "Failed: ['Replica'].", Ingress=("HEALTHY", ""), Replica=("DEPLOY_FAILED", TRACEBACK)
            ),
            "a.yaml is not served: BadCheckpoint: /m/model.safetensors is a git-lfs pointer: run `git lfs pull`.",
        ),
        (status("DEPLOY_FAILED", "Importing failed."), "a.yaml is not served: StartFailed: Importing failed."),
    ],
)
def test_a_start_that_fails_for_good_ends_with_its_reason(found: ApplicationStatusOverview, words: str) -> None:
    with pytest.raises(local_serve.CannotServe) as raised:
        local_serve.follow(lambda: {"a": found}, {"a": "http://127.0.0.1:1"}, "a.yaml", no_call, poll_s=0.001)
    assert str(raised.value) == words


def test_one_failure_of_several_applications_ends_all() -> None:
    found = {"a": status("RUNNING"), "b": status("DEPLOY_FAILED", Replica=("DEPLOY_FAILED", TRACEBACK))}
    with pytest.raises(local_serve.CannotServe, match="BadCheckpoint"):
        local_serve.follow(
            lambda: found, {"a": "http://127.0.0.1:1/a", "b": "http://127.0.0.1:1/b"}, "two.yaml", no_call
        )


@pytest.mark.full
def test_a_model_that_cannot_be_served_serves_nothing_and_is_one_line(tmp_path: Path) -> None:
    """In a process of its own, as `assay serve` is run."""
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN, folder)
    (folder / "model.safetensors").write_text(model_folders.LFS_POINTER)
    config = tmp_path / "config.yaml"
    config.write_text(
        CPU.read_text("utf-8").replace("path: builtin", f"path: {folder}").replace("8000", str(free_port()))
    )
    command = [sys.executable, "-m", "deployments.cli", "serve", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert str(folder / "model.safetensors") in last and "git-lfs pointer" in last
    assert "Traceback" not in done.stderr and "Ray" not in done.stderr

"""Defines what every test may use: the fault-test model, and one Ray cluster for those that need processes."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from deployments.cli.launch.ray_env import KILL_UNHEALTHY, PROXY_CALLBACK
from tests.served import CHOSEN_LINK
from tests.support.ports import free_port

pytest.register_assert_rewrite("tests.deployments")  # fixtures' assertions are reported like those of tests

# A loaded machine is no fault: seconds are judged where a test says so, and no request is refused for its speed.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# Before anything imports Ray or loads the toy: child processes inherit these.
os.environ.update(
    ASSAY_TEST_FAULTS="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    RAY_SERVE_LOG_TO_STDERR="0",
    RAY_worker_niceness="5",  # at 15, Ray's own, they get a few percent of a core that another test computes on
    RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="60",  # else a proxy that starts slowly is killed, and its start fails
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    **PROXY_CALLBACK,
    **KILL_UNHEALTHY,
)


REASON_CHARS = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what is marked `full`, as `make test` does")
    parser.addoption("--rest", action="store_true", help="run what --fast leaves out")


class FailuresAsTheyCome:
    """Tells each failure as it happens: a run that is ended for its time prints no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else report.longreprtext
            self._terminal.write_line(f"\n{report.nodeid} failed in its {report.when}: {reason[:REASON_CHARS]}")


@pytest.hookimpl(trylast=True)  # the reporter is made in this hook too
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # no worker has one
        config.pluginmanager.register(FailuresAsTheyCome(terminal))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out, with `--fast`, tests marked `full`; `full(keep=2)` keeps the first two sets of parameters. `--rest`
    leaves out the others."""
    if not (config.getoption("--fast") or config.getoption("--rest")):
        return
    seen: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("full")
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        (kept if mark is None or seen[name] <= mark.kwargs.get("keep", 0) else left_out).append(item)
    if config.getoption("--rest"):
        kept, left_out = left_out, kept
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def young_garbage_alone() -> None:
    """Tests start engines by the hundred, and a collection of everything takes half a second beside all modules."""
    from engine.utils import garbage_collection

    garbage_collection.HELD_GENERATION = 0


READY_S = 240.0  # for a deployed application to pass its first canary

TOY_ARGS: dict[str, Any] = {
    "model": {"path": "toy", "served_name": "toy"},
    "engine": {"kv_slots": 8192, "max_running": 32, "max_queued_tokens": 1_000_000},
    "health": {"period_s": 1.0, "timeout_s": 5.0},
    "metrics": {"cache_s": 0.0},
    "admission": {"max_wait_s": 600.0},
    "deadlines": {"scoring_s": 600.0},
    "drain": {"handoff_s": 0.1, "grace_s": 0.4, "ingress_grace_s": -3599.5},
    "replica": {"num_cpus": 0.1},
} | CHOSEN_LINK


@pytest.fixture(scope="session")
def toy_args() -> dict[str, Any]:
    """Arguments of a small application over the toy model; copy before changing."""
    return TOY_ARGS


@pytest.fixture(scope="session")
def library() -> Any:
    """The built-in model as the model library has it, in float32: what ours is held against."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.model.model_folder import BUILTIN

    return AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The built-in model's."""
    from engine.tokenizer.tokenizer import load_tokenizer

    return load_tokenizer("builtin")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Callable[..., str]]:
    """Deploys an application into the one cluster of this test run: `cluster(name, args)` gives its URL once its
    `/readyz` is green, which it is a canary after Serve calls it running."""
    import httpx
    import ray
    from ray import serve

    from deployments.cli.launch import ray_node

    port = free_port()
    path = os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))
    ray_node.start(
        lambda: ray.init(
            address="local",
            num_cpus=8,
            object_store_memory=100_000_000,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        )
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def deploy(name: str, args: dict[str, Any]) -> str:
        from deployments.app import build
        from deployments.config.app_args import AppArgs

        serve.run(build(AppArgs.model_validate(args)), name=name, route_prefix=f"/{name}")
        url = f"http://127.0.0.1:{port}/{name}"
        end = time.monotonic() + READY_S
        with httpx.Client(timeout=READY_S, trust_env=False) as http:
            while (answer := http.get(url + "/readyz")).status_code != 200:
                assert time.monotonic() < end, answer.text
                time.sleep(0.05)
        return url

    yield deploy
    ray.shutdown()  # never `ray stop`: it would end every Ray process of the machine

"""build: what must agree between the deployments does, and Ray hands the builder validated arguments."""

import logging
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from deployments.app import REPLICA, build
from deployments.config.app_args import AppArgs
from deployments.observability.serve_log import LOGGERS, log_with_serve


def deployments_of(args: dict[str, Any]) -> tuple[Any, Any]:
    app = call_user_app_builder_with_args_if_necessary(build, args)
    ingress = app._bound_deployment
    return ingress, ingress.init_args[1]._bound_deployment


def test_ray_gives_the_builder_validated_arguments() -> None:
    """With postponed annotations it would give a raw dictionary, unvalidated."""
    ingress, _ = deployments_of({"model": {"path": "toy"}})
    assert isinstance(ingress.init_args[0], AppArgs)
    with pytest.raises(ValidationError):
        deployments_of({"modle": {}})


def test_our_refusals_fire_before_rays() -> None:
    ingress, replica = deployments_of({"admission": {"max_inflight_requests": 17}})
    assert ingress.max_ongoing_requests == 34
    assert replica.max_ongoing_requests == 1024
    for deployment in (ingress, replica):
        assert deployment.max_queued_requests == 2048
        assert deployment.backpressure_config.status_code == 429


def test_an_ingress_may_finish_its_longest_request() -> None:
    ingress, replica = deployments_of({"deadlines": {"max_s": 700}, "drain": {"handoff_s": 5}})
    assert ingress._deployment_config.graceful_shutdown_timeout_s == 710
    assert replica._deployment_config.graceful_shutdown_timeout_s == 35


def test_health_is_asked_for_as_often_as_configured() -> None:
    """Three bad answers, a stall and a start are under 30 s by default."""
    for deployment in deployments_of({"health": {"check_period_s": 3, "check_timeout_s": 4}}):
        held = deployment._deployment_config
        assert (held.health_check_period_s, held.health_check_timeout_s) == (3, 4)


def test_counts_and_resources_arrive() -> None:
    ingress, replica = deployments_of(
        {"ingress": {"count": 3, "num_cpus": 0.5}, "replica": {"count": 2, "num_cpus": 4, "num_gpus": 1}}
    )
    assert (ingress.num_replicas, replica.num_replicas) == (3, 2)
    assert ingress.ray_actor_options["num_cpus"] == 0.5
    assert replica.ray_actor_options["num_gpus"] == 1


def test_what_our_loggers_say_is_in_serves_log(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.name)

    serves = logging.Logger("of Serve", logging.INFO)  # it stands in for "ray.serve", whose records go no further
    serves.addHandler(Heard())
    real = logging.getLogger
    monkeypatch.setattr(logging, "getLogger", lambda name=None: serves if name == "ray.serve" else real(name))
    for name in LOGGERS:
        monkeypatch.setattr(real(name), "parent", real(name).parent)
        request.addfinalizer(partial(real(name).setLevel, logging.NOTSET))  # no level of a former parent is remembered
    names = ("assay.http", "engine.warmup.background_compile", "gpu_sampler.sampler")
    for name in names:
        real(name).info("said")
    assert not heard
    log_with_serve()
    for name in names:
        real(name).info("said")
    assert heard == list(names)


@pytest.mark.full
def test_only_a_replicas_process_imports_torch() -> None:
    """What builds an application and each ingress would else take seconds longer to start."""
    script = "import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    found = {
        module: subprocess.run(
            [sys.executable, "-c", script.format(module=module)], capture_output=True, text=True, check=True
        ).stdout.strip()
        for module in ("deployments.app", REPLICA.rpartition(".")[0])
    }
    assert list(found.values()) == ["[]", "['torch', 'transformers']"], found

"""A CPU install has neither Triton nor FlashInfer: the whole service runs without them."""

import subprocess
import sys

import pytest

WITHOUT = """
import runpy, sys
for name in ("triton", "flashinfer"):
    sys.modules[name] = None
{planted}
import deployments.app, deployments.cli.main, deployments.cli.check.report
sys.argv = ["trace_request", "{request}"]
runpy.run_module("tools.trace_request", run_name="__main__")
"""


def run(request: str, planted: str = "") -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(request=request, planted=planted)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("request_kind", ["score", "completion"])
def test_service_answers_without_triton(request_kind: str) -> None:
    done = run(request_kind)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_import_of_a_kernel_on_the_way_fails_the_same_run() -> None:
    done = run("score", planted="import gpu_sampler.device_logprobs")
    assert done.returncode != 0
    assert "triton" in done.stderr

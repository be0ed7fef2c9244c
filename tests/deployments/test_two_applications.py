"""Two applications in one file, as docs/guides/operations.md shows them: two models under two prefixes of one port."""

import copy
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.served import on_a_free_port, serving

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
NAMES = ("judge", "writer")
ANNOUNCED_S = 120.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("two")
    file, port = on_a_free_port("cpu.yaml", folder, engine={"kv_slots": 8192})
    config = yaml.safe_load(file.read_text("utf-8"))
    [one] = config["applications"]
    config["applications"] = [copy.deepcopy(one) | {"name": name, "route_prefix": f"/{name}"} for name in NAMES]
    for application in config["applications"]:
        application["args"]["model"]["served_name"] = application["name"]
    file.write_text(yaml.safe_dump(config), "utf-8")
    with serving(file, f"http://127.0.0.1:{port}", prefixes=[f"/{name}" for name in NAMES]) as found:
        end = time.monotonic() + ANNOUNCED_S
        while not all(f"at {found}/{name}\n" in (folder / "log.txt").read_text("utf-8") for name in NAMES):
            assert time.monotonic() < end, "an application was not announced"
            time.sleep(0.1)
        yield found
    log = (folder / "log.txt").read_text("utf-8")
    assert "infinite retries" not in log and "disconnected" not in log


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=60) as answer:
        return json.load(answer)


def test_each_prefix_has_the_whole_api_of_its_own_model(url: str) -> None:
    prompt = {"prompt": "This sturdy red", "max_tokens": 4, "temperature": 0}
    texts = set()
    for name in NAMES:
        [found] = ask(f"{url}/{name}/v1/models")["data"]
        assert found["id"] == name
        answer = ask(f"{url}/{name}/v1/completions", {**prompt, "model": name})
        assert answer["model"] == name
        texts.add(answer["choices"][0]["text"])
        assert ask(f"{url}/{name}/v1/rerank", {"query": "red chair", "documents": ["A red chair."]})["model"] == name
        assert ask(f"{url}/{name}/readyz/")["status"] == "ready"
    assert len(texts) == 1  # they are the same model here


def test_a_model_answers_under_its_own_prefix_alone(url: str) -> None:
    for path, body in (("/judge/v1/completions", {"prompt": "a", "model": "writer"}), ("/v1/models", None)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url + path, body)
        refused.value.close()
        assert refused.value.code == 404

"""assay check: seeded mistakes, each found where it is with words that name the remedy; and what is right passes."""

import copy
import hashlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.cli.check import document, report, resources
from deployments.cli.check.findings import Finding
from deployments.cli.main import main

CONFIGS = Path(__file__).parents[3] / "deployments" / "configs"
GOOD: dict[str, Any] = yaml.safe_load((CONFIGS / "cpu.yaml").read_text("utf-8"))
GOOD["http_options"]["port"] = 18_971
Check = Callable[..., report.Report]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def checked(config: dict[str, Any] | str, **options: bool) -> report.Report:
        file = tmp_path / "config.yaml"
        file.write_text(config if isinstance(config, str) else yaml.safe_dump(config), "utf-8")
        return report.check(file, **options)

    return checked


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four logical processors, two GPUs, whatever runs the tests."""
    monkeypatch.setattr(report, "_here", lambda: resources.MachineResources(cpus=4, gpus=2))


def with_(changes: dict[str, Any]) -> dict[str, Any]:
    """The good config with values at paths: `args.engine.max_running`, `app.import_path`, `http_options.port`."""
    config = copy.deepcopy(GOOD)
    app = config["applications"][0]
    for path, value in changes.items():
        *above, last = path.split(".")
        at: Any = config
        for key in above:
            at = (
                {"args": app["args"], "app": app}[key]
                if at is config and key in ("args", "app")
                else at.setdefault(key, {})
            )
        at[last] = value
    return config


ARGS = "applications[0].args"
MISTAKES: list[tuple[dict[str, Any], str, str, str]] = [
    # changes, where, words that name the remedy, level
    ({"proxy_locaton": "HeadOnly"}, "proxy_locaton", "`proxy_location`", "error"),
    ({"htp_options": {"port": 1}}, "htp_options", "`http_options`", "error"),
    ({"http_options.prot": 81}, "http_options.prot", "`port`", "error"),
    ({"logging_config.log_levle": "INFO"}, "logging_config.log_levle", "`log_level`", "error"),
    ({"app.route_prefx": "/"}, "applications[0].route_prefx", "`route_prefix`", "error"),
    (
        {"app.deployments": [{"name": "Replica", "max_ongoing_request": 9}]},
        "applications[0].deployments[0].max_ongoing_request",
        "`max_ongoing_requests`",
        "error",
    ),
    (
        {"app.deployments": [{"name": "Replica", "num_replica": 2}]},
        "applications[0].deployments[0].num_replica",
        "`num_replicas`",
        "error",
    ),
    (
        {"app.deployments": [{"name": "Replica", "ray_actor_options": {"num_gpu": 1}}]},
        "applications[0].deployments[0].ray_actor_options.num_gpu",
        "`num_gpus`",
        "error",
    ),
    (
        {"app.deployments": [{"name": "Replica", "autoscaling_config": {"min_replica": 1}}]},
        "applications[0].deployments[0].autoscaling_config.min_replica",
        "`min_replicas`",
        "error",
    ),
    ({"app.deployments": [{"name": "Replicas"}]}, "applications[0].deployments[0].name", "`Replica`", "error"),
    ({"app.import_path": "deployments.app.build"}, "applications[0].import_path", "deployments.app:build", "error"),
    ({"proxy_location": "Headonly"}, "proxy_location", "HeadOnly", "error"),
    ({"http_options.port": "80a"}, "http_options.port", "integer", "error"),
    ({"args.modle": {}}, f"{ARGS}.modle", "`model`", "error"),
    ({"args.engine.max_runing": 4}, f"{ARGS}.engine.max_runing", "`max_running`", "error"),
    ({"args.engine.served_name": "x"}, f"{ARGS}.engine.served_name", "`model.served_name`", "error"),
    ({"args.kv_slots": 4}, f"{ARGS}.kv_slots", "`engine.kv_slots`", "error"),
    ({"args.limits.max_item": 4}, f"{ARGS}.limits", "`max_items`", "error"),
    ({"args.templates": {"t": {"preset": "plain", "label": []}}}, f"{ARGS}.templates.t.label", "`labels`", "error"),
    ({"args.engine.max_running": 5000}, f"{ARGS}.engine", "[1, 1024]", "error"),
    ({"args.deadlines.scoring_s": -1}, f"{ARGS}.deadlines.scoring_s", "greater than 0", "error"),
    ({"args.replica.num_gpus": 1}, f"{ARGS}.replica.num_gpus", "set 0", "error"),
    ({"args.replica.num_gpus": 2, "args.model.device": "cuda"}, f"{ARGS}.replica.num_gpus", "set 1", "error"),
    ({"args.model.device": "cuda"}, f"{ARGS}.replica.num_gpus", "set 1", "error"),
    ({"args.auth.mod": "keys"}, f"{ARGS}.auth.mod", "`mode`", "error"),
    ({"args.auth": {"mode": "keys"}}, f"{ARGS}.auth", "`auth.keys_file` must be given", "error"),
    (
        {"args.auth": {"mode": "keys", "keys_file": "/no/such"}, "http_options.host": "0.0.0.0"},
        f"{ARGS}.auth.keys_file",
        "On this machine",
        "warning",
    ),
    (
        {"app.deployments": [{"name": "Ingress", "user_config": {"auth": {"mod": "keys"}}}]},
        "applications[0].deployments[0].user_config.auth.mod",
        "`mode`",
        "error",
    ),
    (
        {"app.deployments": [{"name": "Replica", "user_config": {"auth": {}}}]},
        "applications[0].deployments[0].user_config",
        "Only Ingress",
        "error",
    ),
    ({"args.ingress": {"num_gpus": 1}}, f"{ARGS}.ingress.num_gpus", "set 0", "error"),
    ({"args.health.min_replicas": 3}, f"{ARGS}.health.min_replicas", "raise replica.count", "error"),
    ({"args.replica.count": 9}, "", "9.1 logical CPUs", "warning"),
    ({"http_options.host": "0.0.0.0"}, "http_options.host", "set 127.0.0.1", "error"),
    ({"http_options": {"port": 18_971}}, "http_options.host", "Not given", "error"),
    ({"proxy_location": "Disabled"}, "proxy_location", "set HeadOnly", "error"),
    ({"app.route_prefix": None}, "applications[0].route_prefix", "set a path", "error"),
    (
        {
            "http_options.host": "0.0.0.0",
            "args.auth": {"mode": "keys", "keys": [{"name": "a", "sha256": "0" * 64}]},
            "app.deployments": [{"name": "Ingress", "user_config": {"auth": {"mode": "disabled"}}}],
        },
        "http_options.host",
        "applications[0].deployments[0].user_config.auth.mode keys",
        "error",
    ),
    (
        {"app.deployments": [{"name": "Ingress", "user_config": {"auth": {"mode": "keys", "keys_file": "/no"}}}]},
        "applications[0].deployments[0].user_config.auth.keys_file",
        "On this machine",
        "warning",
    ),
    ({"http_options.port": 8265}, "http_options.port", "dashboard", "error"),
    ({"http_options.port": 8404}, "http_options.port", "HAProxy", "warning"),
    ({"http_options.port": 30_500}, "http_options.port", "30000 to 31000", "warning"),
    ({"http_options.port": 70_000}, "http_options.port", "[1, 65535]", "error"),
    (
        {"grpc_options": {"port": 18_971, "grpc_servicer_functions": ["a.b"]}},
        "grpc_options.port",
        "choose another",
        "error",
    ),
    ({"http_options.request_timeout_s": 30}, "http_options.request_timeout_s", "deadlines.max_s, 3600", "error"),
    (
        {"app.deployments": [{"name": "Ingress", "max_ongoing_requests": 100}]},
        "applications[0].deployments[0].max_ongoing_requests",
        "admission.max_inflight_requests, 1024",
        "error",
    ),
    (
        {"app.deployments": [{"name": "Ingress", "graceful_shutdown_timeout_s": 20}]},
        "applications[0].deployments[0].graceful_shutdown_timeout_s",
        "cuts streams",
        "warning",
    ),
]
OF_MODELS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"args.model.path": "/no/such/folder"}, f"{ARGS}.model.path", "must be a folder", "error"),
    ({"args.model.max_model_len": 1 << 20}, f"{ARGS}.model", "`model.max_model_len` must be in", "error"),
    ({"args.model.tokenizer_path": "/no/such"}, f"{ARGS}.model.tokenizer_path", "tokenizer", "error"),
    ({"args.rerank.template": "bultin"}, ARGS, "`rerank.template` must be one of", "error"),
    ({"args.chat.template_file": "/no/such.jinja"}, ARGS, "`chat.template_file`", "error"),
    (
        {"args.templates": {"t": {"preset": "builtin", "labels": ["both of these", "no"]}}},
        ARGS,
        "`templates.t.labels",
        "error",
    ),
    ({"args.templates": {"t": {"item": "{{ itme }}"}}}, ARGS, "`templates.t", "error"),
    ({"args.speculation": {"method": "draft_model", "draft": "/no"}}, f"{ARGS}.speculation.draft", "folder", "error"),
    ({"args.engine.kv_slots": 64}, f"{ARGS}.engine.kv_slots", "raise it over that", "warning"),
    ({"args.engine.kv_slots": 1 << 40}, f"{ARGS}.engine.kv_slots", "lower it", "warning"),
]


@pytest.mark.parametrize(
    ("changes", "where", "words", "level"), MISTAKES + OF_MODELS, ids=lambda value: str(value)[:60]
)
def test_a_seeded_mistake_is_found_and_the_remedy_named(
    check: Check, changes: dict[str, Any], where: str, words: str, level: str
) -> None:
    found = check(with_(changes), with_model=any(changes is one for one, *_ in OF_MODELS))
    assert [one for one in found.findings if (one.where, one.level) == (where, level) and words in one.message], (
        found.findings
    )
    assert found.good is (level != "error")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: [", "must be YAML or JSON"),
        ("[]", "must be a mapping with a list `keys`"),
        ("keys: [{name: a, sha256: 12}]", "keys.0.sha256: It must be 64 hexadecimal digits in lower case."),
    ],
)
def test_a_file_of_keys_that_exists_and_holds_none_is_an_error(
    check: Check, text: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    auth = {"mode": "keys", "keys_file": str(file)}
    for changes, where in (
        ({"args.auth": auth}, ARGS),
        (
            {"app.deployments": [{"name": "Ingress", "user_config": {"auth": auth}}]},
            "applications[0].deployments[0].user_config",
        ),
    ):
        [found] = check(with_(changes), with_model=False).findings
        assert (found.level, found.where) == ("error", f"{where}.auth.keys_file")
        assert words in found.message and not found.message.endswith("..")


def test_the_table_of_mistakes_is_as_long_as_it_should_be() -> None:
    assert len(MISTAKES) >= 20 and len(OF_MODELS) >= 5


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: str(file.stem))
def test_a_shipped_config_passes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file), "--plan"]) == 0
    out = capsys.readouterr().out
    assert "Replica: " in out and "good" in out
    assert ("no KV cache" if file.stem == "cpu-classifier" else "bytes a token") in out


MANIFEST = CONFIGS.parents[1] / "k8s" / "base" / "rayservice.yaml"


def test_the_shipped_manifest_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Its file of keys is mounted in the cluster alone, and its GPUs may not be here."""
    found = report.check(MANIFEST)
    assert found.good, found.findings
    replica = found.plans[0].parts[1]
    assert (replica.min_actors, replica.max_actors, found.plans[0].gpus) == (2, 4, 4)


def test_a_secret_of_the_file_is_not_repeated(check: Check) -> None:
    key = "assay-sk-" + "x" * 40
    found = check(with_({"args.auth": {"mode": "keys", "keys": [{"name": "a", "sha256": key, "note": key}]}}))
    assert not found.good and not any(key in str(one) for one in found.findings)


DOCS = CONFIGS.parents[1] / "docs"
SHOWN = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.rglob("*.md"))
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.M | re.S))
    if re.search(r"^applications:", block, re.M)
]


@pytest.mark.parametrize("text", SHOWN)
def test_a_configuration_that_a_page_shows_is_served(check: Check, text: str) -> None:
    """Digests are cut short there."""
    text = re.sub(r"(?<=sha256: )\.\.\.|\w*…", lambda cut: hashlib.sha256(cut[0].encode()).hexdigest(), text)
    found = check(text, with_model=False)
    assert found.good, found.findings


def test_a_good_config_has_nothing_to_say(check: Check) -> None:
    assert check(GOOD).findings == ()


def test_a_key_that_stands_twice_is_found_although_yaml_forgets_it(check: Check) -> None:
    found = check(yaml.safe_dump(GOOD) + "proxy_location: EveryNode\n")
    assert any(one.where == "proxy_location" and "twice" in one.message for one in found.findings)


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ({"ray_actor_options": 1}, "ray_actor_options"),
        ({"ray_actor_options": {"num_cpus": "one"}}, "ray_actor_options.num_cpus"),
        ({"max_ongoing_requests": "many"}, "max_ongoing_requests"),
        ({"graceful_shutdown_timeout_s": "long"}, "graceful_shutdown_timeout_s"),
        ({"autoscaling_config": {"min_replicas": "two"}}, "autoscaling_config.min_replicas"),
        ({"autoscaling_config": {"min_replicas": 4, "max_replicas": 2}}, "autoscaling_config"),
    ],
)
def test_an_override_of_a_wrong_kind_is_a_finding(check: Check, override: dict[str, Any], where: str) -> None:
    found = check(with_({"app.deployments": [{"name": "Ingress", **override}]}))
    assert not found.good
    assert all(one.where.startswith(f"applications[0].deployments[0].{where}") for one in found.findings)
    assert check(with_({"app.deployments": 5})).findings[0].where == "applications[0].deployments"


def test_a_port_that_is_taken_is_a_warning(check: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = check(with_({"http_options.port": other.getsockname()[1]}))
    assert found.good and any("another process" in one.message for one in found.findings)


def test_an_override_is_reported(check: Check) -> None:
    found = check(with_({"app.deployments": [{"name": "Replica", "num_replicas": 3, "max_ongoing_requests": 8}]}))
    reported = {one.where.rpartition(".")[2]: one.message for one in found.findings if one.level == "note"}
    assert "3 replaces 1" in reported["num_replicas"] and "8 replaces 1024" in reported["max_ongoing_requests"]
    assert found.plans[0].parts[1].max_actors == 3


def test_auto_is_the_count_that_serve_makes_of_it(check: Check) -> None:
    auto = {"name": "Replica", "num_replicas": "auto"}
    found = check(with_({"app.deployments": [auto], "args.health.min_replicas": 3}), with_model=False)
    assert found.good, found.findings
    assert (found.plans[0].parts[1].min_actors, found.plans[0].parts[1].max_actors) == (1, 100)
    auto["autoscaling_config"] = {"max_replicas": 4}  # type: ignore[assignment]
    part = check(with_({"app.deployments": [auto]}), with_model=False).plans[0].parts[1]
    assert (part.min_actors, part.max_actors) == (1, 4)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"auto_map": {"AutoModel": "x.py"}, "model_type": "mine"}, "no such code is run"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"model_type": "mamba"}, "not supported"),
    ],
)
def test_a_folder_that_would_be_refused_at_start_is_refused_here(
    check: Check, broken: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(broken))
    (tmp_path / "weights.safetensors").touch()
    found = check(with_({"args.model.path": str(tmp_path)}))
    assert any(why in one.message or "model" in one.where for one in found.findings) and not found.good
    assert check(with_({"args.model.path": str(tmp_path)}), with_model=False).good


def test_pickled_weights_are_refused(check: Check, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").touch()
    found = check(with_({"args.model.path": str(tmp_path)}))
    assert any("safetensors" in one.message for one in found.findings)


def manifest(**spec: Any) -> str:
    config = yaml.safe_dump(GOOD)
    return yaml.safe_dump({"apiVersion": "v1", "kind": "Service"}) + "---\n" + yaml.safe_dump(
        {"apiVersion": "ray.io/v1", "kind": "RayService", "spec": {"serveConfigV2": config, **spec}}
    )  # fmt: skip


@pytest.mark.parametrize("name", ["deploymentUnhealthySecondThreshold", "serviceUnhealthySecondThreshold"])
def test_a_dead_field_of_a_manifest_is_found(check: Check, name: str) -> None:
    assert check(manifest(), with_model=False).findings == ()
    found: tuple[Finding, ...] = check(manifest(**{name: 300}), with_model=False).findings
    assert [(one.where, "Remove it" in one.message) for one in found] == [(f"spec.{name}", True)]


def test_a_typing_mistake_inside_a_manifest_is_found(check: Check) -> None:
    found = check(manifest().replace("max_running", "max_runing"))
    assert any("`max_running`" in one.message for one in found.findings)


@pytest.mark.parametrize("text", ["", "- a", "a: [", "kind: Service", "kind: RayService\nspec: a"])
def test_what_is_no_config_is_status_2(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert main(["check", str(file)]) == 2
    assert main(["check", str(tmp_path / "none")]) == 2
    assert "must be" in capsys.readouterr().err


def test_findings_and_plan_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(with_({"args.replica.count": 3, "args.engine.max_runing": 1})))
    assert main(["check", "--json", str(file)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["good"] is False and found["findings"][0]["level"] == "error"
    file.write_text(yaml.safe_dump(with_({"args.replica.count": 3})))
    assert main(["check", "--json", "--plan", str(file)]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    assert (plan["cpus"], plan["gpus"], plan["memory"]["kv_pool"]) == (3.1, 0.0, 65536 * 4096)


def test_the_plan_counts_weights_as_they_are_held(check: Check) -> None:
    """The built-in model's file is in bfloat16, and a replica on a CPU holds float32."""
    elements = 1_246_848
    for dtype, item in (("auto", 4), ("float32", 4), ("bfloat16", 2)):
        memory = check(with_({"args.model.dtype": dtype})).plans[0].memory
        assert memory is not None and memory.weights == elements * item
        assert memory.kv_of_token == 2 * 4 * 2 * 64 * item


def test_words_of_secrets_are_not_repeated() -> None:
    from deployments.cli.check import arguments

    assert arguments.given("x" * 81) == "" and arguments.given({"key": 1}) == "" and arguments.given(3) == " Given: 3."


def test_the_unknown_key_walk_sees_what_rays_own_validation_does_not() -> None:
    """The planted fault: the schema alone takes each of these without a word."""
    from ray.serve.schema import ServeDeploySchema

    silent = [
        changes for changes, where, words, _ in MISTAKES if "prefx" in where or "locaton" in where or "htp" in where
    ]
    assert len(silent) == 3
    for changes in silent:
        ServeDeploySchema.model_validate(with_(changes))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSAY_TEST_FAULTS", "1")
        yield


def test_the_reader_names_the_line_of_a_second_key(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("a: 1\nb:\n  c: 1\n  c: 2\n")
    assert "line 4" in document.read(file).findings[0].message


def test_a_merge_key_is_read_as_serve_reads_it(tmp_path: Path) -> None:
    text = "a: &a {device: cpu}\nb: &b\n  <<: *a\n  device: cuda\n  path: x\nc: {<<: *b, path: y}\n"
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert document.read(file) == document.Document(yaml.safe_load(text), ())
    file.write_text(f"{text}d: {{<<: *b, path: y, path: z}}\n")
    assert [(one.where, "line 7" in one.message) for one in document.read(file).findings] == [("path", True)]


def test_a_key_that_is_no_text_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("? [a]\n: 1\n")
    with pytest.raises(document.Unreadable, match="unhashable key"):
        document.read(file)

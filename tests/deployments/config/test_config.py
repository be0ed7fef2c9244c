"""Options: a bad value refuses to start and says which, and the shipped files are right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.config.app_args import HARD_LIMITS, AppArgs
from deployments.config.sections import RerankArgs
from deployments.config.settings import SamplingDefaults
from deployments.limits import Limits
from scoring.prompts.templates import PRESETS, TemplateSpec

CONFIGS = Path(__file__).parents[3] / "deployments" / "configs"


@pytest.mark.parametrize(
    ("given", "field", "value", "bound"),
    [
        ({"engine": {"max_running": 5000}}, "max_running", "5000", "1024"),
        ({"engine": {"kv_slots": 1}}, "kv_slots", "1", "2"),
        ({"engine": {"kv_memory_fraction": 1.0}}, "kv_memory_fraction", "1.0", "(0, 1)"),
        ({"limits": {"max_labels": 257}}, "max_labels", "257", "256"),
        ({"limits": {"max_logprob_token_ids": 129}}, "max_logprob_token_ids", "129", "128"),
        ({"limits": {"max_items": 0}}, "max_items", "0", "1"),
        ({"deadlines": {"scoring_s": 9999}}, "scoring_s", "9999", "3600"),
        ({"sampling": {"temperature": 2.5}}, "temperature", "2.5", "2"),
        ({"health": {"period_s": float("nan")}}, "period_s", "nan", "finite"),
        ({"replica": {"count": 0}}, "count", "0", "1"),
        ({"drain": {"ingress_grace_s": -3601}}, "drain.ingress_grace_s", "-3601", "-3600"),
        ({"chat": {"template_flags": ["Think!"]}}, "template_flags", "Think!", "lower-case letters"),
        ({"chat": {"render_timeout_s": 0}}, "render_timeout_s", "0", "greater than 0"),
        ({"model": {"revision": "main"}}, "revision", "main", "[0-9a-f]{40}"),
        ({"templates": {"t": {"preset": "other"}}}, "preset", "other", "qwen3_reranker"),
        ({"templates": {"t": {"preset": "plain", "suffix": "x"}}}, "suffix", "both", "absent"),
        ({"templates": {"t": {"labels": ["a"]}}}, "preset", "neither", "given"),
        ({"templates": {"t": {"prefix": "x", "defaults": {"query": "x"}}}}, "defaults", "query", "instruction"),
        ({"templates": {"a b": {"preset": "plain"}}}, "templates", "a b", "without spaces"),
        ({"speculation": {"num_speculative_tokens": 9}}, "num_speculative_tokens", "9", "8"),
        ({"speculation": {"ngram_tokens": 0}}, "ngram_tokens", "0", "1"),
        ({"speculation": {"draft_sample_method": "gumbel"}}, "draft_sample_method", "gumbel", "`probabilistic`"),
        ({"speculation": {"method": "draft_model"}}, "speculation.draft", "none", "draft_model"),
        ({"speculation": {"method": "ngram", "draft": "x"}}, "speculation.draft", "x", "draft_model"),
        ({"speculation": {"method": "medusa"}}, "method", "medusa", "ngram"),
        ({"speculation": {"rejection_sample_method": "typical"}}, "rejection_sample_method", "typical", "block"),
        ({"speculation": {"seeded_rejection_sample_method": "synthetic"}}, "acceptance_rates", "Given: 0", "4 rates"),
        ({"speculation": {"synthetic_acceptance_rates": [0.5]}}, "acceptance_rates", "1 rates", "synthetic"),
        ({"speculation": {"synthetic_acceptance_rates": [1.5]}}, "acceptance_rates", "1.5", "1"),
    ],
)
def test_a_bad_value_names_field_value_and_range(given: dict[str, Any], field: str, value: str, bound: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AppArgs.model_validate(given)
    message = str(refused.value)
    assert field in message
    assert value in message
    assert bound in message


@pytest.mark.parametrize(
    "given",
    [
        {"modle": {}},
        {"model": {"pth": "x"}},
        {"limits": {"max_label": 3}},
        {"admission": {"max_inflight": 3}},
        {"templates": {"t": {"preset": "plain", "prefixes": 1}}},
        {"rerank": {"templates": "t"}},
        {"speculation": {"num_draft_tokens": 4}},
    ],
)
def test_an_unknown_key_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AppArgs.model_validate(given)


def test_every_limit_can_be_set_and_arrives_in_the_http_layer() -> None:
    for number, name in enumerate(Limits().flat()):
        value = min(HARD_LIMITS.get(name, 1 << 20), 17 + number)
        settings = AppArgs(limits={name: value}).api_settings(SamplingDefaults(), {})
        assert settings.limits.flat() == Limits().flat() | {name: value}


def test_a_chat_template_comes_from_a_file_that_is_read_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    args = AppArgs.model_validate(
        {"chat": {"template_file": str(file), "template_flags": ["think"], "expose_template": False}}
    )
    with pytest.raises(ValueError, match=r"`chat\.template_file` must be a readable text file"):
        args.api_settings(SamplingDefaults(), {})
    file.write_text("{{ messages }} é", "utf-8")
    chat = args.api_settings(SamplingDefaults(), {}).chat
    assert (chat.template, chat.template_flags, chat.expose_template) == ("{{ messages }} é", ("think",), False)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="it is not UTF-8"):
        args.api_settings(SamplingDefaults(), {})
    file.write_text("x" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="1048577"):
        args.api_settings(SamplingDefaults(), {})
    assert AppArgs().api_settings(SamplingDefaults(), {}).chat.template is None


def test_hard_limits_name_limits() -> None:
    assert HARD_LIMITS.keys() <= Limits().flat().keys()


def test_sections_arrive_where_they_are_used() -> None:
    args = AppArgs.model_validate(
        {
            "engine": {"max_running": 7, "max_queued_tokens": 99},
            "sampler": {"logprobs_mode": "processed_logprobs", "backend": "numpy"},
            "sampling": {"top_p": 0.5},
            "admission": {"max_inflight_requests": 3},
            "wire": {"strict": True},
            "truncation": {"policy": "error"},
            "stream": {"keep_alive_s": 3},
            "http": {"tokenizer_threads": 5},
        }
    )
    engine = args.engine_config()
    assert (engine.max_running, engine.max_queued_tokens) == (7, 99)
    assert (engine.sampler.logprobs_mode, engine.sampler.backend) == ("processed_logprobs", "numpy")
    settings = args.api_settings(SamplingDefaults(temperature=0.3, top_p=0.9), {"ray": "2"})
    assert settings.sampling == SamplingDefaults(temperature=0.3, top_p=0.5)
    assert (settings.max_inflight_requests, settings.strict, settings.truncation) == (3, True, "error")
    assert (settings.stream.keep_alive_s, settings.tokenizer_threads, settings.versions) == (3, 5, {"ray": "2"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"top_k": 50.5}, "`top_k` of the model.s generation_config.json must be an integer .* Given: a float."),
        ({"temperature": "0.7"}, "`temperature` .* must be a number in .* Given: a str"),
        ({"top_p": 0}, "`top_p` .* Given: 0. Set `sampling.top_p`."),
    ],
)
def test_a_default_that_no_request_may_have_is_refused_unless_the_operator_sets_it(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    """Requests that leave the field out would be refused for it."""
    (tmp_path / "generation_config.json").write_text(json.dumps(given | {"min_p": None, "eos_token_id": 2}))
    own = SamplingDefaults.from_folder(tmp_path)
    with pytest.raises(ValueError, match=words):
        AppArgs().api_settings(own, {})
    settings = AppArgs.model_validate({"sampling": dict.fromkeys(given, 1)}).api_settings(own, {})
    assert settings.sampling == SamplingDefaults(**dict.fromkeys(given, 1))


@pytest.mark.parametrize(("text", "words"), [("[1, 2]", r"a JSON object\. Given: \[1, 2\]"), ("{", "JSON")])
def test_a_file_of_defaults_that_holds_none_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"generation_config\.json must be {words}"):
        SamplingDefaults.from_folder(tmp_path)


def test_a_model_in_the_current_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (".", "./"):
        assert AppArgs.model_validate({"model": {"path": path}}).model.name == tmp_path.name
    assert AppArgs.model_validate({"model": {"path": ".."}}).model.name == tmp_path.parent.name


def test_a_model_folder_is_shown_by_its_last_part_only() -> None:
    args = AppArgs.model_validate({"model": {"path": "/srv/secret/place/tiny"}})
    assert (args.model.name, args.model.root) == ("tiny", "tiny")
    assert AppArgs.model_validate({"model": {"path": "org/tiny"}}).model.root == "org/tiny"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_config_is_valid_and_listens_on_this_machine_only(file: Path) -> None:
    raw = yaml.safe_load(file.read_text("utf-8"))
    schema = ServeDeploySchema.model_validate(raw)
    assert raw.keys() <= ServeDeploySchema.model_fields.keys()  # Serve drops unknown keys without a word
    assert schema.http_options.host == "127.0.0.1"
    for application in schema.applications:
        assert application.import_path == "deployments.app:build"
        AppArgs.model_validate(application.args)


def test_templates_arrive_in_the_http_layer() -> None:
    given = {
        "templates": {
            "short": {"preset": "builtin", "labels": [" true", " false"]},
            "qwen": {"preset": "qwen3_reranker", "defaults": {"instruction": "Find it"}},
            "own": {"prefix": "{{ query }}", "suffix": "\n\n", "labels": ["a"], "defaults": {"system": "s"}},
        },
        "rerank": {"template": "short", "return_documents": True},
    }
    settings = AppArgs.model_validate(given).api_settings(SamplingDefaults(), {})
    assert settings.rerank == RerankArgs(template="short", return_documents=True)
    assert settings.templates["short"] == replace(PRESETS["builtin"], labels=(" true", " false"))
    assert settings.templates["qwen"] == replace(PRESETS["qwen3_reranker"], defaults={"instruction": "Find it"})
    assert settings.templates["own"] == TemplateSpec(
        prefix="{{ query }}", suffix="\n\n", labels=("a",), defaults={"system": "s"}
    )


def test_the_built_in_model_ranks_with_its_own_form() -> None:
    assert AppArgs().api_settings(SamplingDefaults(), {}).rerank_preset == "builtin"
    other = AppArgs.model_validate({"model": {"path": "org/other"}})
    assert other.api_settings(SamplingDefaults(), {}).rerank_preset is None

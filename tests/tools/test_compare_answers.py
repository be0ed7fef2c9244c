"""Recordings of answers: what changes from run to run is no difference, and every planted change is one."""

import base64
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.compare_answers import (
    RENAMED_SETTINGS,
    ROOT,
    STEADY,
    Answer,
    Difference,
    NotServed,
    command_module,
    compare,
    main,
    write_config,
)
from tools.compare_answers_requests import POST_PATHS, SERVICES, build_requests

IDS = ("abcdefghijklmnopqrstuvwxyz", "zyxwvutsrqponmlkjihgfedcba")
TIMES = (1_795_460_126, 1_795_460_999)
SCORES = (
    '{"id":"score-%s","object":"list","created":%d,"model":"builtin","data":[{"index":0,"score":0.12345678901234566,'
    '"label_mass":1e-5,"error":null}]}'
)
EVENT = (
    '{"id":"cmpl-%s","object":"text_completion","created":%d,"model":"builtin","choices":[{"index":%d,"text":"%s",'
    '"logprobs":{"tokens":["%s"],"token_logprobs":[%s]},"finish_reason":%s}]}'
)
ERROR = '{"error":{"message":"`n` must be in [1, 128]. Given: 0.","code":"invalid_value"},"request_id":"req-%s"}'
METRICS = '# HELP assay_x Words.\n# TYPE assay_x counter\nassay_x_total{replica="%s",route="/a"} %s\n'
STARTED_LATE = 'assay_requests_total{route="/readyz",status="503"} 3.0\n'
SCHEMA = {
    "components": {"schemas": {"Row": {"title": "Row", "properties": {"title": {"type": "string", "title": "T"}}}}}
}


def event(run: int, index: int, *tokens: str, logprob: str = "-0.5", finish: str = "null") -> str:
    body = EVENT % (
        IDS[run],
        TIMES[run],
        index,
        "".join(tokens),
        '","'.join(tokens),
        ",".join([logprob] * len(tokens)),
        finish,
    )
    return f"data: {body}"


def answers(run: int) -> dict[str, Answer]:
    """A small recording of one of two runs that differ in nothing but ids, times, measurements and grouping."""
    bodies: dict[str, tuple[str, str | None, int, str | list[str]]] = {
        "score": ("/generative_scoring", '{"query": "a"}', 200, SCORES % (IDS[run], TIMES[run])),
        "error": ("/v1/completions", '{"n": 0}', 422, ERROR % IDS[run]),
        "seeded": ("/v1/completions", '{"seed": 7}', 200, '{"choices":[{"seed":7}]}'),
        "drawn": ("/v1/completions", '{"n": 1}', 200, f'{{"choices":[{{"seed":{TIMES[run]}}}]}}'),
        "metrics": ("/metrics", None, 200, METRICS % (IDS[run][:8], run) + run * STARTED_LATE),
        "schema": ("/openapi.json", None, 200, json.dumps(SCHEMA)),
        "ready": ("/readyz", None, 200, f'{{"status":"ready","canary_age_s":{0.25 + run}}}'),
        "stream": ("/v1/completions", '{"stream": true, "seed": 7}', 200, stream(run)),
    }
    headers = [
        ["date", f"today {run}"],
        ["content-type", "application/json"],
        ["x-assay-request-id", f"req-{IDS[run]}"],
    ]
    headers += [["x-assay-queue-ms", f"{run}.125"], ["x-request-id", f"0b5bf5e{run}-9b3c-4a53-8c3c-0123456789ab"]]
    return {
        name: Answer(service="plain", name=name, path=path, sent=sent, status=status, headers=headers, body=body)
        for name, (path, sent, status, body) in bodies.items()
    }


def stream(run: int) -> list[str]:
    first = [event(run, 0, "- A"), event(run, 1, "- B")]
    grouped = [event(run, 0, " red"), event(run, 0, " chair")], [event(run, 0, " red", " chair")]
    last = [event(run, 1, " lamp", finish='"stop"'), event(run, 0, ".", finish='"length"'), "data: [DONE]", ""]
    return first + grouped[run] + last


def found(
    change: Callable[[dict[str, Answer]], object] = lambda _: None, **renamed: dict[str, str]
) -> list[Difference]:
    """The differences between the first run and the second one with a change. `renamed`: by path, without the slash."""
    new = answers(1)
    change(new)
    names = {f"/{path}": table for path, table in renamed.items()}
    return compare(answers(0).values(), new.values(), names)


def body_change(name: str, old: str, new: str) -> Callable[[dict[str, Answer]], None]:
    def change(recording: dict[str, Answer]) -> None:
        answer = recording[name]
        text = json.dumps(answer.body)
        old_json, new_json = json.dumps(old)[1:-1], json.dumps(new)[1:-1]
        assert text.count(old_json) == 1
        recording[name] = replace(answer, body=json.loads(text.replace(old_json, new_json)))

    return change


def test_ids_times_measurements_and_grouping_are_no_differences() -> None:
    assert answers(0) != answers(1)
    assert found() == []


@pytest.mark.parametrize(
    ("name", "old", "new", "where"),
    [
        ("score", "0.12345678901234566", "0.12345678901234567", "body.data[0].score"),
        ("score", "1e-5", "0.00001", "body.data[0].label_mass"),
        ("score", '"index":0,"score"', '"index":0,"weight":1,"score"', "body.data[0] (keys)"),
        ("score", '"label_mass":1e-5,"error":null', '"error":null,"label_mass":1e-5', "body.data[0] (keys)"),
        ("score", '"error":null', '"error": null', "body, character"),
        ("error", "Given: 0.", "Given: 1.", "body.error.message"),
        ("seeded", '"seed":7', '"seed":8', "body.choices[0].seed"),
        ("metrics", "assay_x_total", "assay_y_total", "series"),
        ("metrics", 'route="/a"', 'route="/b"', "series"),
        ("schema", '"type": "string"', '"type": "number"', "body.components.schemas.Row.properties.title.type"),
        ("schema", '"properties": {"title"', '"properties": {"name"', "body.components.schemas.Row.properties (keys)"),
        ("ready", '"ready"', '"unready"', "body.status"),
        ("stream", '"text":" lamp"', '"text":" desk"', "stream.choices.1.text"),
        ("stream", '"tokens":[" lamp"]', '"tokens":[" desk"]', "stream.choices.1.logprobs.tokens[1]"),
        ("stream", '"length"', '"stop"', "stream.choices.0.finish_reason"),
        ("stream", "[DONE]", "[STOP]", "stream.others[0]"),
    ],
)
def test_a_changed_body_is_a_difference(name: str, old: str, new: str, where: str) -> None:
    differences = found(body_change(name, old, new))
    assert {difference.request for difference in differences} == {f"[plain] {name}"}
    assert differences[0].where.startswith(where)


def test_a_changed_digit_of_a_stream_is_a_difference() -> None:
    def change(recording: dict[str, Answer]) -> None:
        body = [*recording["stream"].body]
        body[0] = event(1, 0, "- A", logprob="-0.50")
        recording["stream"] = replace(recording["stream"], body=body)

    [difference] = found(change)
    assert difference.where == "stream.choices.0.logprobs.token_logprobs[0]"
    assert (difference.base, difference.new) == ("-0.5", "-0.50")


@pytest.mark.parametrize(
    ("old", "new", "rounded"),
    [
        ("0.12345678901234566", "0.12344", True),
        ("0.12345678901234566", "0.12335", False),
        ("0.12345678901234566", "0", False),
        ('"index":0', '"index":1', False),
    ],
)
def test_floats_within_rounding_are_one_difference_of_their_own(old: str, new: str, rounded: bool) -> None:
    [difference] = found(body_change("score", old, new))
    assert (difference.where == "body (rounding)") is rounded
    if rounded:
        assert (difference.base, difference.new) == ("1 values", "1.7e-05")


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ((-12.0, 1.00001), "body (rounding)"),
        ((-12.0, 1.0001), "body.columns.score"),
        ((math.nan, 1.0), "body.columns.score"),
    ],
)
def test_columns_are_compared_as_floats(values: tuple[float, float], where: str) -> None:
    def column(*floats: float) -> str:
        data = base64.b64encode(struct.pack("<2f", *floats)).decode()
        return json.dumps({"columns": {"score": data}})

    base, new = ([replace(answers(0)["score"], body=column(*floats))] for floats in ((-12.0, 1.0), values))
    assert [one.where for one in compare(base, new)] == [where]


@pytest.mark.parametrize("missing", range(6))
def test_a_missing_event_is_a_difference(missing: int) -> None:
    def change(recording: dict[str, Answer]) -> None:
        body = [*recording["stream"].body]
        del body[missing]
        recording["stream"] = replace(recording["stream"], body=body)

    assert {difference.request for difference in found(change)} == {"[plain] stream"}


def test_a_changed_status_header_or_request_is_a_difference() -> None:
    def changed(**fields: Any) -> list[Difference]:
        return found(lambda recording: recording.update(score=replace(recording["score"], **fields)))

    headers = answers(1)["score"].headers
    assert [one.where for one in changed(status=500)] == ["status"]
    assert [one.where for one in changed(headers=[*headers, ["retry-after", "1"]])] == ["headers"]
    assert [one.base for one in changed(headers=headers[:1])] == [
        "content-type: application/json",
        "x-assay-request-id: req-ID",
        "x-request-id: UUID",
    ]
    assert [one.where for one in changed(headers=headers[::-1])] == ["order of headers"]
    assert [one.where for one in changed(sent='{"query": "b"}')] == ["body of the request"]


def test_a_missing_or_added_answer_is_a_difference() -> None:
    assert [one.new for one in found(lambda recording: recording.pop("score"))] == ["not recorded"]
    added = replace(answers(1)["score"], name="more")
    assert [one.base for one in found(lambda recording: recording.update(more=added))] == ["not recorded"]


def test_renamed_names_are_no_differences_on_their_path() -> None:
    change = body_change("metrics", "# TYPE assay_x counter\nassay_x_total", "# TYPE assay_y counter\nassay_y_total")
    names = {"assay_x": "assay_y"}
    assert len(found(change)) == 4
    assert found(change, metrics=names) == []
    assert found(metrics=names) != []
    assert len(found(change, readyz=names)) == 4
    assert len(found(change, metrics={"assay": "assay_y", "x": "y"})) == 4


def test_the_command_reports_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "base.jsonl", tmp_path / "new.jsonl"
    for run, file in enumerate(files):
        lines = [{"commit": "x"}, *(vars(answer) for answer in answers(run).values())]
        file.write_text("\n".join(map(json.dumps, lines)), "ascii")
    assert main(["compare", *map(str, files)]) == 0
    files[1].write_text(files[1].read_text("ascii").replace("Given: 0.", "Given: 1."), "ascii")
    capsys.readouterr()
    assert main(["compare", *map(str, files)]) == 1
    shown = capsys.readouterr().out
    assert "[plain] error\n  at body.error.message\n    base: " in shown
    assert "Given: 0." in shown and "Given: 1." in shown and "1 differences in 1 of them" in shown


def test_changes_on_purpose_are_counted_by_their_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "base.jsonl", tmp_path / "new.jsonl"]
    base = replace(answers(0)["score"], headers=[["x-request-id", "8f14e45f-ceea-467f-ab3e-5b7a1c2d3e4f"]])
    for new, status in (
        (replace(base, headers=[["x-request-id", f"req-{IDS[1]}"]]), 0),
        (replace(base, headers=[]), 1),
    ):
        for file, answer in zip(files, (base, new), strict=True):
            file.write_text("{}\n" + json.dumps(vars(answer)), "ascii")
        assert main(["compare", *map(str, files)]) == status
        assert ("on purpose: x-request-id is the id of body and logs: 1" in capsys.readouterr().out) is (status == 0)


def test_the_requests_have_unique_names_and_reach_every_route() -> None:
    requests = build_requests()
    assert requests == build_requests()
    assert len({(one.service, one.name) for one in requests}) == len(requests) >= 300
    assert {one.service for one in requests} == set(SERVICES)
    for path in POST_PATHS:
        assert sum(one.path == path for one in requests) >= 10


@pytest.mark.full
def test_a_service_is_configured_by_its_own_checkout_on_a_free_port_of_this_machine(tmp_path: Path) -> None:
    file, port = write_config(ROOT, SERVICES["guarded"], tmp_path)
    config = yaml.safe_load(file.read_text("utf-8"))
    assert config["http_options"]["host"] == "127.0.0.1" and config["http_options"]["port"] == port != 8000
    own = yaml.safe_load((ROOT / "deployments" / "configs" / "cpu.yaml").read_text("utf-8"))["applications"][0]["args"]
    args = config["applications"][0]["args"]
    named = {name: RENAMED_SETTINGS.get(f"engine.{name}", f"engine.{name}") for name in STEADY["engine"]}
    steady = {named[name].removeprefix("engine."): value for name, value in STEADY["engine"].items()}
    assert args["model"] == own["model"] and args["engine"] == own["engine"] | steady
    assert {name: args[name] for name in SERVICES["guarded"]} == yaml.safe_load(json.dumps(SERVICES["guarded"]))


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("deployments/cli.py", "deployments.cli"),
        ("deployments/cli/__main__.py", "deployments.cli"),
        ("deployments/cli/main.py", "deployments.cli.main"),
    ],
)
def test_the_command_line_is_found_where_the_checkout_has_it(tmp_path: Path, file: str, module: str) -> None:
    with pytest.raises(NotServed, match="none of them"):
        command_module(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert command_module(tmp_path) == module

"""`assay score` in process: batches, errors of one item, refusals, bounded memory, what it says and how it ends."""

import csv
import errno
import io
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from deployments.cli.main import main
from deployments.cli.progress import ProgressBar, duration
from deployments.cli.score_files.client import AHEAD, in_order
from deployments.cli.score_files.journal import Journal
from deployments.cli.score_files.output import Printed

Score = Callable[..., int]


@pytest.fixture
def score(service: Any, tmp_path: Path) -> Score:
    """Runs the command; `output` is out.jsonl."""

    def run(source: Path, *options: str) -> int:
        fixed = ["score", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", service.url, "--no-progress"]
        labels = [] if any(option.startswith("--label") for option in options) else ["--labels", " yes, no"]
        return main([*fixed, *labels, *options])

    return run


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]


def write(tmp_path: Path, *records: object, name: str = "in.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    return path


def error(code: str, param: str | None) -> dict[str, Any]:
    return {"error": {"code": code, "message": f"About {param}.", "param": param}}


def test_a_line_a_record_with_every_field_of_the_answer(
    service: Any, score: Score, make_input: Any, tmp_path: Path
) -> None:
    assert score(make_input(25), "--id-field", "id") == 0
    found = rows(tmp_path)
    assert [row["index"] for row in found] == list(range(25)) and found[7]["id"] == "r7"
    assert set(found[0]) == {
        "index", "id", "score", "probabilities", "logprobs", "label_mass", "prompt_tokens", "cached_tokens",
        "truncated", "truncated_tokens", "error",
    }  # fmt: skip
    assert sorted(len(body["items"]) for body in service.bodies) == [5, 10, 10]  # a query a request
    assert all(
        body["labels"] == [" yes", " no"] and set(body) == {"query", "items", "labels"} for body in service.bodies
    )


def test_a_request_has_no_more_items_than_configured(service: Any, score: Score, make_input: Any) -> None:
    assert score(make_input(25), "--batch-items", "4", "--query", "one for all") == 0
    assert sorted(len(body["items"]) for body in service.bodies) == [1, 4, 4, 4, 4, 4, 4]
    assert {body["query"] for body in service.bodies} == {"one for all"}


def test_the_fields_of_a_request_are_mapped_and_added(service: Any, score: Score, tmp_path: Path) -> None:
    source = write(tmp_path, {"ask": [1, 2], "doc": [3]}, {"ask": [1, 2], "doc": []})
    options = ["--query-field", "ask", "--item-field", "doc", "--label-token-ids", "7,9"]
    assert score(source, *options, "--set", "truncation_side=left", "--set", "max_item_tokens=5") == 0
    assert service.bodies == [
        {
            "query": [1, 2],
            "items": [[3], []],
            "label_token_ids": [7, 9],
            "truncation_side": "left",
            "max_item_tokens": 5,
        }
    ]


def test_whatever_a_row_of_the_answer_has_stands_in_the_output(service: Any, tmp_path: Path) -> None:
    row = {"index": 0, "object": "score", "score": 0.5, "continuations": [{"weight": 0.5}], "error": None}
    service.script = lambda body: (200, {"data": [row] * len(body["items"])}, {})
    source = write(tmp_path, {"query": "q", "item": "a"}, {"query": "q", "item": "b"})
    command = ["score", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", service.url, "--no-progress"]
    assert main([*command, "--set", 'continuations=["x", "y"]']) == 0
    assert service.bodies == [{"query": "q", "items": ["a", "b"], "continuations": ["x", "y"]}]
    assert rows(tmp_path)[1] == {"index": 1, "score": 0.5, "continuations": [{"weight": 0.5}], "error": None}
    assert main([*command, "--set", 'continuations=["x"]', "--labels", "a"]) == 2


def test_a_template_may_bring_labels_and_need_no_query(service: Any, score: Score, tmp_path: Path) -> None:
    source = write(tmp_path, {"item": "a"})
    assert main(["score", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", service.url, "--template", "t"]) == 0
    assert service.bodies == [{"items": ["a"], "template": "t"}]


def test_records_that_cannot_be_asked_about_have_errors_and_the_others_scores(
    service: Any, score: Score, tmp_path: Path
) -> None:
    good = {"query": "q", "item": "a"}
    source = write(tmp_path, good, {"query": "q"}, {"query": "q", "item": 5}, {"query": "q", "item": [True]}, good)
    source.write_text(source.read_text() + '{"torn\n{"query": "q", "item": [1]}\n', "utf-8")
    assert score(source) == 1
    found = rows(tmp_path)
    assert [row["error"] and row["error"]["code"] for row in found] == [
        None,
        *["invalid_record"] * 3,
        None,
        *["invalid_record"] * 2,
    ]
    assert "`item` must be text or token ids. Given: nothing." in found[1]["error"]["message"]
    assert service.items_asked() == 2


def test_an_item_that_the_service_refuses_is_found_by_halving(
    service: Any, score: Score, make_input: Any, tmp_path: Path
) -> None:
    def script(body: dict[str, Any]) -> Any:
        return (400, error("context_length_exceeded", "items[0]"), {}) if "item 13" in body["items"] else None

    service.script = script
    assert score(make_input(30)) == 1
    found = rows(tmp_path)
    assert [row["index"] for row in found if row["error"]] == [13]
    assert found[13]["error"]["code"] == "context_length_exceeded" and found[13]["score"] is None
    assert len(service.bodies) == 3 + 2 * 4  # 13 of 10 to 19: halves of 5, 3, 2 and 1


def test_a_refusal_that_would_meet_every_item_ends_the_run_immediately(
    service: Any, score: Score, make_input: Any, tmp_path: Path, capsys: Any
) -> None:
    service.script = lambda body: (422, error("label_not_single_token", "labels[0]"), {})
    assert score(make_input(500), "--concurrency", "1") == 2
    assert "About labels[0]. (422 label_not_single_token)" in capsys.readouterr().err
    assert rows(tmp_path) == [] and len(service.bodies) < 10


def test_a_service_that_stays_away_leaves_what_is_done(
    service: Any, score: Score, make_input: Any, tmp_path: Path, capsys: Any
) -> None:
    def script(body: dict[str, Any]) -> Any:
        return (503, error("not_ready", None), {"retry-after": "60"}) if body["query"] == "query 2" else None

    service.script = script
    assert score(make_input(50), "--patience", "1") == 3
    assert "continues from here" in capsys.readouterr().err
    assert len(rows(tmp_path)) == 20
    service.script = lambda body: None
    before = len(service.bodies)
    assert score(make_input(50)) == 0
    assert [row["index"] for row in rows(tmp_path)] == list(range(50))
    # A request of the first run may come late, but what was done is not asked again.
    assert {item for body in service.bodies[before:] for item in body["items"]} == {f"item {i}" for i in range(20, 50)}


def test_an_input_that_has_changed_is_refused_by_name(
    score: Score, make_input: Any, tmp_path: Path, capsys: Any
) -> None:
    source = make_input(20)
    assert score(source) == 0
    assert score(source) == 0  # nothing is left to do
    source.write_text(source.read_text().replace("item 19", "item nineteen"))
    before = rows(tmp_path)
    assert score(source) == 2
    assert f"{source} has changed since" in capsys.readouterr().err
    assert rows(tmp_path) == before


def test_an_input_that_changes_while_it_is_read_is_noticed(
    service: Any, score: Score, make_input: Any, capsys: Any
) -> None:
    source = make_input(20)

    def script(body: dict[str, Any]) -> None:
        source.write_text(source.read_text() + "\n")

    service.script = script
    assert score(source, "--concurrency", "1") == 2
    assert "changed while it was read" in capsys.readouterr().err


def test_other_labels_are_refused_by_name(score: Score, make_input: Any, capsys: Any) -> None:
    source = make_input(3)
    assert score(source) == 0
    assert score(source, "--labels", "a,b") == 2
    assert "another `labels`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--labels", "a", "--label-token-ids", "1"], "Given: labels and label_token_ids"),
        (["--url", "nowhere"], "--url"),
        (["-o", "{input}"], "another file than the input"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    score: Score, make_input: Any, capsys: Any, options: list[str], words: str
) -> None:
    source = make_input(3)
    assert score(source, *(option.format(input=source) for option in options)) == 2
    assert words in capsys.readouterr().err


def test_a_key_is_sent_without_its_line_end_and_a_wrong_one_is_not_shown(
    service: Any, score: Score, make_input: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_API_KEY", "assay-sk-1\r\n")
    assert score(make_input(3)) == 0
    assert [one["authorization"] for one in service.headers] == ["Bearer assay-sk-1"]
    for wrong in ("assay-sk-1\nassay-sk-2", "assay-sk-\u00fc"):
        monkeypatch.setenv("ASSAY_API_KEY", wrong)
        assert score(make_input(3)) == 2
        said = capsys.readouterr().err
        assert "`ASSAY_API_KEY` must be printable ASCII" in said and "assay-sk" not in said
    assert len(service.bodies) == 1


@pytest.mark.parametrize(
    "option",
    [
        ["--set", "labels=1"], ["--set", "x"], ["--batch-items", "0"],
        ["--timeout", "0"], ["--timeout", "nan"], ["--timeout", "inf"],
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_read_is_usage(score: Score, make_input: Any, option: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        score(make_input(3), *option)
    assert ended.value.code == 2


def test_the_summary_counts_what_was_done(score: Score, make_input: Any, capsys: Any) -> None:
    assert score(make_input(25), "--json") == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["items"], found["done"], found["errors"], found["done_now"]) == (25, 25, 0, 25)
    assert (found["prompt_tokens"], found["cached_tokens"], found["status"]) == (250, 100, 0)
    assert "25 of 25 items" in said.err


def test_a_full_disk_leaves_what_is_done(
    score: Score, make_input: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Journal.append

    def full(journal: Journal, lines: Any) -> None:
        if journal.done >= 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(journal, lines)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", full)
        assert score(make_input(50)) == 3
    assert "No space left" in capsys.readouterr().err and len(rows(tmp_path)) == 20
    assert score(make_input(50)) == 0
    assert [row["index"] for row in rows(tmp_path)] == list(range(50))


def test_an_answer_of_another_shape_ends_the_run(service: Any, score: Score, make_input: Any, capsys: Any) -> None:
    service.script = lambda body: (200, {"data": []}, {})
    assert score(make_input(3)) == 2
    assert "3 rows are wanted" in capsys.readouterr().err


def test_memory_is_bounded_by_a_window_of_jobs() -> None:
    """The first job hangs: no more than the window is read meanwhile, and order is kept."""
    taken: list[int] = []
    first = threading.Event()

    def requests() -> Any:
        for number in range(1000):
            taken.append(number)
            yield number

    def call(number: int) -> int:
        if number == 0:
            first.wait(10)
        return number

    seen: list[int] = []

    def look() -> None:
        seen.append(len(taken))
        first.set()

    threading.Timer(0.2, look).start()
    assert list(in_order(call, requests(), 3)) == list(range(1000))
    assert seen == [AHEAD * 3]


def test_the_first_exception_is_raised_in_its_place() -> None:
    def call(number: int) -> int:
        if number == 5:
            raise ValueError("five")
        return number

    found = []
    with pytest.raises(ValueError, match="five"):
        for result in in_order(call, range(100), 4):
            found.append(result)
    assert found == [0, 1, 2, 3, 4]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_says_how_fast_and_how_long() -> None:
    clock, terminal = Clock(), Terminal()
    progress = ProgressBar(1000, 100, terminal, clock)
    clock.now = 10.0
    progress.update(300, 2, 4000)
    progress.end(2)
    assert terminal.getvalue().split("\x1b[K")[-1] == (
        "[#######-----------------] 300 of 1,000 (30%), 20 items/s, 400 tokens/s, 35 s left, 2 errors\n"
    )


def test_progress_to_a_file_is_a_plain_line_now_and_then() -> None:
    clock, log = Clock(), io.StringIO()
    progress = ProgressBar(1000, 0, log, clock)
    for _ in range(100):
        clock.now += 0.3
        progress.update(round(clock.now) * 10, 0, 0)
    progress.end(0)
    lines = log.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith("100 of 1,000 (10%), 10 items/s") and "\r" not in log.getvalue()


def test_progress_of_nothing_divides_by_nothing() -> None:
    assert "0 of 0 (100%)" in ProgressBar(0, 0, None, Clock()).line(0)


def test_durations_have_two_units() -> None:
    assert [duration(x) for x in (0.4, 59, 60, 3599, 3600, 90_000)] == [
        "0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "25 h 00 min",
    ]  # fmt: skip


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_csv_and_parquet_are_made_of_the_finished_lines(
    service: Any, make_input: Any, tmp_path: Path, ending: str
) -> None:
    output = tmp_path / f"out.{ending}"
    command = ["score", str(make_input(25)), "-o", str(output), "--url", service.url, "--no-progress"]
    assert main([*command, "--labels", " yes, no", "--id-field", "id"]) == 0
    lines = [json.loads(line) for line in (tmp_path / f"out.{ending}.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 25
    if ending == "csv":
        with output.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert [float(row["score"]) for row in found] == [line["score"] for line in lines]
        assert json.loads(found[0]["probabilities"]) == lines[0]["probabilities"]
        assert (found[7]["id"], found[7]["error"]) == ("r7", "")
    else:
        assert parquet.read_table(output).to_pylist() == lines
    before = output.read_bytes()
    output.unlink()
    assert main([*command, "--labels", " yes, no", "--id-field", "id"]) == 0  # nothing is scored again
    assert output.read_bytes() == before and len(service.bodies) == 3


def test_errors_of_some_lines_have_a_place_in_every_format(service: Any, tmp_path: Path) -> None:
    source = write(tmp_path, {"query": "q", "item": "a"}, {"query": "q", "item": 5}, {"query": "q", "item": "b"})
    for ending in ("csv", "parquet"):
        command = ["score", str(source), "-o", str(tmp_path / f"out.{ending}"), "--url", service.url]
        assert main([*command, "--labels", " yes, no"]) == 1
    error = parquet.read_table(tmp_path / "out.parquet").to_pylist()[1]["error"]
    assert error["code"] == "invalid_record"
    assert "invalid_record" in (tmp_path / "out.csv").read_text("utf-8").splitlines()[2]


@pytest.mark.parametrize(
    ("ending", "ids"),
    [("parquet", [1, "a"]), ("parquet", [1 << 70]), ("parquet", [{}]), ("parquet", ["\ud800"]), ("csv", ["\ud800"])],
)
def test_ids_that_a_format_cannot_hold_leave_the_lines_and_say_so(
    service: Any, tmp_path: Path, capsys: Any, ending: str, ids: list[Any]
) -> None:
    source = write(tmp_path, *({"id": one, "item": "a"} for one in ids))
    output = tmp_path / f"out.{ending}"
    command = ["score", str(source), "-o", str(output), "--url", service.url, "--query", "q", "--labels", "a,b"]
    assert main([*command, "--id-field", "id"]) == 2
    lines = tmp_path / f"out.{ending}.jsonl"
    assert f"Every line is in {lines}." in capsys.readouterr().err
    assert [json.loads(line)["id"] for line in lines.read_text("utf-8").splitlines()] == ids
    assert not output.exists() and not (tmp_path / f"out.{ending}.new").exists()


@pytest.mark.parametrize("name", ["out.txt", "out", "out.xlsx"])
def test_an_output_of_an_unknown_format_is_refused(
    service: Any, make_input: Any, tmp_path: Path, capsys: Any, name: str
) -> None:
    command = ["score", str(make_input(3)), "-o", str(tmp_path / name), "--url", service.url, "--labels", "a,b"]
    assert main(command) == 2
    assert "must be `-` or end in .jsonl, .ndjson, .csv, .parquet" in capsys.readouterr().err
    assert not service.bodies and not (tmp_path / name).exists()


def test_a_csv_of_no_run_is_not_overwritten(service: Any, make_input: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out.csv").write_text("mine")
    command = ["score", str(make_input(3)), "-o", str(tmp_path / "out.csv"), "--url", service.url, "--labels", "a,b"]
    assert main(command) == 2
    assert "is of no run" in capsys.readouterr().err and (tmp_path / "out.csv").read_text() == "mine"


def test_standard_input_and_output(service: Any, make_input: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = io.TextIOWrapper(io.BytesIO(make_input(25).read_bytes()))
    monkeypatch.setattr("sys.stdin", given)
    command = ["score", "-", "-o", "-", "--url", service.url, "--no-progress", "--labels", " yes, no"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["index"] for line in said.out.splitlines()] == list(range(25))
    assert "25 of 25 items" in said.err
    assert main([*command, "--json"]) == 2


def test_lines_on_standard_output_are_those_of_a_file(capsys: Any) -> None:
    Printed().append([{"index": 0, "id": math.nan, "score": 0.5}])
    assert json.loads(capsys.readouterr().out) == {"index": 0, "id": "nan", "score": 0.5}


def test_an_input_that_goes_away_meanwhile_has_changed(
    service: Any, score: Score, make_input: Any, capsys: Any
) -> None:
    source = make_input(3)
    answer = service.script

    def gone(body: Any) -> Any:
        source.unlink(missing_ok=True)
        return answer(body)

    service.script = gone
    assert score(source) == 2
    assert "has changed while it was read" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_patience_is_a_number_of_seconds(score: Score, make_input: Any, capsys: Any, seconds: str) -> None:
    with pytest.raises(SystemExit):
        score(make_input(1), f"--patience={seconds}")
    assert "must be a number of seconds >= 0" in capsys.readouterr().err


def test_lines_on_standard_output_are_not_said_to_continue(service: Any, make_input: Any, capsys: Any) -> None:
    service.script = lambda body: (503, error("not_ready", None), {"retry-after": "60"})
    command = ["score", str(make_input(3)), "-o", "-", "--url", service.url, "--patience", "1", "--labels", "a,b"]
    assert main(command) == 3
    said = capsys.readouterr().err
    assert "begins anew" in said and "continues" not in said


def test_a_wrong_field_stops_before_the_first_request(
    service: Any, score: Score, make_input: Any, tmp_path: Path, capsys: Any
) -> None:
    assert score(make_input(25), "--item-field", "text") == 2
    said = capsys.readouterr().err
    assert "None of the first 16 records can be scored: `text` must be text or token ids. Given: nothing." in said
    assert "Fields of the first: `id`, `query`, `item`." in said
    assert not service.bodies and not rows(tmp_path)


def test_records_without_a_query_are_refused_with_the_options_of_the_query(
    service: Any, score: Score, tmp_path: Path, capsys: Any
) -> None:
    assert score(write(tmp_path, {"item": "a"})) == 2
    assert "with --query, or name its field with --query-field." in capsys.readouterr().err
    assert not service.bodies
    assert score(write(tmp_path, {"query": 1, "item": "a"}, name="other.jsonl")) == 2
    assert "--query" not in capsys.readouterr().err


def test_a_service_that_wants_a_key_is_answered_with_the_name_of_the_variable(
    service: Any, score: Score, make_input: Any, capsys: Any
) -> None:
    service.script = lambda body: (401, {"error": {"code": "invalid_api_key", "message": "A key is needed."}}, {})
    assert score(make_input(3)) == 2
    assert "A key is needed. (401 invalid_api_key) Set ASSAY_API_KEY to a valid key.\n" in capsys.readouterr().err


def test_the_summary_shows_the_first_error(service: Any, score: Score, tmp_path: Path, capsys: Any) -> None:
    source = write(tmp_path, {"query": "q", "item": "a"}, {"query": "q", "item": 5}, {"query": "q"})
    assert score(source, "--json") == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["first_error"]["index"] == 1
    words = "First error: record 1: invalid_record: `item` must be text or token ids. Given: another value."
    assert words in said.err
    assert score(source, "--json") == 1  # nothing is left to score, and the error is still known
    assert words in capsys.readouterr().err

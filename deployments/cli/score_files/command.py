"""Scores a file against a running service: `assay score INPUT -o OUTPUT`. After an interruption at any moment, the same
command continues where the output ends."""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from deployments.cli.api_key import api_key, remedy
from deployments.cli.arguments import integer, number
from deployments.cli.progress import ProgressBar, duration
from deployments.cli.score_files.client import GaveUp, Refusal, ServiceClient, in_order
from deployments.cli.score_files.journal import Journal, JournalError
from deployments.cli.score_files.output import STDOUT, Printed, finish, open_output
from deployments.cli.score_files.reader import READERS, InputError, InputFile, InputRecord
from deployments.cli.score_files.routes import ROUTES, RecordFields, ScoringRoute, request_field

STDIN = Path("-")
MAX_TIMEOUT_S = 86_400
CHECKED = 16  # records that are looked at before the first request
ALL_SCORED, SOME_FAILED, REFUSED, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130
STATUSES = """The API key of a service with keys is read from ASSAY_API_KEY. exit status: 0 every item has a score; 1
some have an error instead; 2 the options, the input or the output are wrong, or the service refuses all items; 3 the
service was unreachable for too long; 130 interrupted. After 3 and 130, and after a kill at any moment, the same command
continues where the output ends."""


class ServiceRefused(Exception):
    """Says that the service refuses all items."""


class ScoredBatch(NamedTuple):
    """Holds the output lines of a batch and its token counts."""

    lines: list[dict[str, Any]]
    tokens: int = 0
    cached: int = 0


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("score", help="score a file against a running service", epilog=STATUSES)
    parser.set_defaults(run=run)
    option = parser.add_argument
    option("input", type=Path, help=f"one record an item: {', '.join(READERS)}, or - for JSONL on standard input")
    option(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="one line a record, in the same order: .jsonl, .ndjson, .csv, .parquet, or - for JSONL on standard output",
    )
    option("--url", default="http://127.0.0.1:8000", help="the service (%(default)s)")
    option("--route", choices=sorted(ROUTES), default="generative_scoring", help="the route (%(default)s)")
    option(
        "--labels",
        type=_texts,
        default=(),
        metavar="TEXT,TEXT",
        help="labels; spaces count: ' yes, no' is ' yes' and ' no'",
    )
    option("--label-token-ids", type=_ids, default=(), metavar="ID,ID", help="instead of --labels")
    option("--template", help="a prompt template of the service")
    option("--query", help="one query for all records, instead of a field")
    option("--query-field", default="query", help="field of a record with the query (%(default)s)")
    option("--item-field", default="item", help="field of a record with the item (%(default)s)")
    option("--continuations-field", help="field with continuations: texts or lists of token ids")
    option("--id-field", help="a field to copy into the output as `id`")
    option(
        "--set", type=_field, action="append", default=[], metavar="NAME=VALUE", help="any other field of the request"
    )
    option("--batch-items", type=_positive, default=64, help="largest number of items in a request (%(default)s)")
    option("--concurrency", type=_positive, default=8, help="concurrent requests (%(default)s)")
    option("--timeout", type=_seconds, default=120.0, metavar="SECONDS", help="for one answer (%(default)g)")
    whole = "for all attempts of a request (%(default)g)"
    option("--patience", type=_patience, default=300.0, metavar="SECONDS", help=whole)
    option("--no-progress", action="store_true", help="print only the summary")
    option("--json", action="store_true", help="print the summary as JSON on standard output")


@dataclass(slots=True, kw_only=True)
class FileScorer:
    """Scores one file, and counts its tokens."""

    source: InputFile
    route: ScoringRoute
    service: ServiceClient
    concurrency: int
    done_before: int = 0
    tokens: int = 0
    cached: int = 0

    def check_first(self) -> None:
        """Raises InputError if none of the first records can be scored, as with a wrong name of a field."""
        first = list(islice(self.source.records(), CHECKED))
        problems = [self.route.problem(record) for record in first]
        if first and all(problems):
            names = ", ".join(f"`{name}`" for name in first[0].fields) or "none"
            raise InputError(
                f"None of the first {len(first)} records can be scored: {problems[0]} Fields of the first: {names}."
                f"{self._about_query(first[0], problems[0] or '')}"
            )

    def _about_query(self, record: InputRecord, problem: str) -> str:
        """Names the options of the query where a record's problem is that it has none."""
        if not problem.startswith(f"`{self.route.names.query}`") or self.route.query_of(record) is not None:
            return ""
        return " Give one query for all records with --query, or name its field with --query-field."

    def score(self, journal: Journal | Printed, progress: ProgressBar) -> None:
        """Scores what the journal does not have yet.

        Raises:
            GaveUp, ServiceRefused, InputError: what is in the journal by then is valid.
        """
        self.done_before = journal.done
        if not journal.done:
            self.check_first()
        batches = self.route.batches(self.source.records(journal.done))
        for found in in_order(self.score_batch, batches, self.concurrency):
            journal.append(found.lines)
            self.tokens += found.tokens
            self.cached += found.cached
            progress.update(journal.done, journal.failed, self.tokens)

    def score_batch(self, batch: Sequence[InputRecord]) -> ScoredBatch:
        """Scores a batch. If one item may have caused a refusal, the batch is halved until that item is alone."""
        if batch[0].problem is not None:
            return ScoredBatch([self.route.failed(record, "invalid_record", record.problem or "") for record in batch])
        answer = self.service.post(self.route.path, self.route.body(batch))
        if not isinstance(answer, Refusal):
            try:
                return ScoredBatch(self.route.lines(batch, answer), *self.route.tokens(answer))
            except (ValueError, TypeError, KeyError) as error:
                raise ServiceRefused(f"the service's answer is not one of {self.route.path}: {error}") from None
        if not self.route.of_items(answer):
            raise ServiceRefused(f"{answer.message} ({answer.status} {answer.code}){remedy(answer.status)}")
        if len(batch) == 1:
            return ScoredBatch([self.route.failed(batch[0], answer.code, answer.message)])
        half = len(batch) // 2
        one, other = self.score_batch(batch[:half]), self.score_batch(batch[half:])
        return ScoredBatch(one.lines + other.lines, one.tokens + other.tokens, one.cached + other.cached)


def run(given: argparse.Namespace) -> int:
    if given.input != STDIN:
        return _run(given)
    with tempfile.TemporaryDirectory(prefix="assay-") as folder:  # the records are read twice: to count and to score
        given.input = Path(folder) / "standard-input.jsonl"
        with given.input.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        return _run(given)


def _run(given: argparse.Namespace) -> int:
    started = time.monotonic()
    try:
        if given.json and given.output == STDOUT:
            raise ValueError("`--json` must be absent where the output is standard output.")
        work = _prepare(given)
        stamp, terms = work.source.stamp(), {"input": work.source.fingerprint(), **work.route.terms()}
        total = work.source.count()
        journal = open_output(given.output, work.source.path, terms)
    except (InputError, JournalError, ValueError, OSError) as error:
        return _report(str(error), REFUSED)
    progress = ProgressBar(total, journal.done, None if given.no_progress else sys.stderr)
    try:
        status = _score(work, journal, progress)
    finally:
        work.service.close()
        journal.close()
    if status == ALL_SCORED and _stamp(work.source) != stamp:
        return _report(f"{given.input} has changed while it was read: the output mixes both.", REFUSED)
    if status == ALL_SCORED:
        status = _finish(given.output) or (SOME_FAILED if journal.failed else ALL_SCORED)
    progress.end(journal.failed)
    _summary(given, work, journal, total, time.monotonic() - started, status)
    return status


def _score(work: FileScorer, journal: Journal | Printed, progress: ProgressBar) -> int:
    again = "The same command continues from here."
    if isinstance(journal, Printed):
        again = "The same command begins anew: standard output cannot be continued."
    try:
        work.score(journal, progress)
    except GaveUp as error:
        return _report(f"{error} {again}", UNFINISHED)
    except (ServiceRefused, InputError) as error:
        return _report(str(error), REFUSED)
    except BrokenPipeError:  # the reader of standard output has gone
        raise
    except OSError as error:  # from a file; errors of the connection are in GaveUp
        return _report(f"{error} {again}", UNFINISHED)
    except KeyboardInterrupt:
        return _report(f"interrupted. {again}", INTERRUPTED)
    return ALL_SCORED


def _stamp(source: InputFile) -> tuple[int, int] | None:
    """Returns the stamp of an input, or None where it has gone."""
    try:
        return source.stamp()
    except OSError:
        return None


def _finish(output: Path) -> int:
    try:
        finish(output)
    except JournalError as error:
        return _report(str(error), REFUSED)
    return ALL_SCORED


def _prepare(given: argparse.Namespace) -> FileScorer:
    """Makes the objects of a run. Raises ValueError for options that contradict each other."""
    if given.output.resolve() == given.input.resolve():
        raise ValueError("`--output` must be another file than the input.")
    route = ROUTES[given.route](
        names=RecordFields(
            item=given.item_field, query=given.query_field, continuations=given.continuations_field,
            id=given.id_field, fixed_query=given.query,
        ),
        labels=given.labels,
        label_token_ids=given.label_token_ids,
        template=given.template,
        fields=dict(given.set),
        max_items=given.batch_items,
    )  # fmt: skip
    service = ServiceClient(given.url, api_key=api_key(), timeout_s=given.timeout, patience_s=given.patience)
    return FileScorer(source=InputFile(given.input), route=route, service=service, concurrency=given.concurrency)


def _summary(
    given: argparse.Namespace, work: FileScorer, journal: Journal | Printed, total: int, seconds: float, status: int
) -> None:
    """Prints items and errors of the whole output, and tokens, time and rate of this run."""
    now = journal.done - work.done_before
    rate = now / seconds if seconds > 0 else 0.0
    if given.json:
        found = {
            "output": str(given.output),
            "items": total,
            "done": journal.done,
            "errors": journal.failed,
            "first_error": journal.first_error,
            "done_now": now,
            "prompt_tokens": work.tokens,
            "cached_tokens": work.cached,
            "retries": work.service.retries,
            "seconds": round(seconds, 3),
            "items_per_s": round(rate, 1),
            "status": status,
        }
        print(json.dumps(found))
    print(
        f"{journal.done:,} of {total:,} items in {given.output}, {journal.failed:,} with errors. This run: "
        f"{now:,} items, {work.tokens:,} tokens ({work.cached:,} cached), {duration(seconds)}, {rate:,.0f} items/s, "
        f"{work.service.retries:,} retries.",
        file=sys.stderr,
    )
    if journal.first_error is not None:
        first = journal.first_error
        print(f"First error: record {first['index']}: {first['code']}: {first['message']}", file=sys.stderr)


def _report(message: str, status: int) -> int:
    print(f"assay score: {message}", file=sys.stderr)
    return status


def _texts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _ids(text: str) -> tuple[int, ...]:
    return tuple(integer(part) for part in text.split(","))


def _field(text: str) -> tuple[str, Any]:
    try:
        return request_field(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    found = number(text)
    if not 0 < found <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"must be in (0, {MAX_TIMEOUT_S}]. Given: {text}.")
    return found


def _patience(text: str) -> float:
    found = number(text)
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds >= 0. Given: {text}.")
    return found


def _positive(text: str) -> int:
    found = integer(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1. Given: {found}.")
    return found

"""assay score INPUT -o OUTPUT: scores a file against a running service. Killed at any moment and started again, it goes
on where the output ends."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deployments.cli.progress import Progress, duration
from deployments.cli.score_files.client import GaveUp, Refusal, Service, in_order
from deployments.cli.score_files.journal import Ledger, LedgerError
from deployments.cli.score_files.payloads import ROUTES, request_field
from deployments.cli.score_files.prompts import Mapped, Questions
from deployments.cli.score_files.reader import READERS, InputError, Record, Source

ALL_SCORED, SOME_FAILED, REFUSED, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130
STATUSES = """exit status: 0 every item has a score; 1 some have an error instead; 2 refused: nothing to do but change
something; 3 the service could not be reached for too long; 130 interrupted. After 3 and 130, and after a kill at any
moment, the same command goes on where it was."""


class Refused(Exception):
    """The service refuses in a way that would meet every item."""


class Answered(NamedTuple):
    """A line for each record of a batch, and what the service says of their tokens."""

    lines: list[dict[str, Any]]
    tokens: int = 0
    cached: int = 0


def add(commands: Any) -> None:
    parser = commands.add_parser("score", help="score a file against a running service", epilog=STATUSES)
    parser.set_defaults(run=run)
    option = parser.add_argument
    option("input", type=Path, help=f"a record an item: {', '.join(READERS)}")
    option("-o", "--output", type=Path, required=True, help="JSONL, a line a record in the same order")
    option("--url", default="http://127.0.0.1:8000", help="the service (%(default)s)")
    option("--route", choices=sorted(ROUTES), default="generative_scoring", help="what is asked (%(default)s)")
    option(
        "--labels", type=_texts, default=(), metavar="TEXT,TEXT", help="spaces count: ' yes, no' is ' yes' and ' no'"
    )
    option("--label-token-ids", type=_ids, default=(), metavar="ID,ID", help="instead of --labels")
    option("--template", help="a template that the service has")
    option("--query", help="one query for all records, instead of a field")
    option("--query-field", default="query", help="where a record has its query (%(default)s)")
    option("--item-field", default="item", help="where a record has its item (%(default)s)")
    option("--continuations-field", help="where a record has what may follow its item: a list of texts or token ids")
    option("--id-field", help="a field to copy into the output as `id`")
    option(
        "--set", type=_field, action="append", default=[], metavar="NAME=VALUE", help="any other field of the request"
    )
    option("--batch-items", type=_positive, default=64, help="items of one query in a request, at most (%(default)s)")
    option("--concurrency", type=_positive, default=8, help="requests at once (%(default)s)")
    option("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one answer (%(default)g)")
    option("--patience", type=float, default=300.0, metavar="SECONDS", help="for one request's retries (%(default)g)")
    option("--no-progress", action="store_true", help="say nothing before the summary")
    option("--json", action="store_true", help="the summary on standard output, as JSON")


@dataclass(slots=True, kw_only=True)
class Run:
    """One run over a file: what is asked whom, and what came of it."""

    source: Source
    route: Questions
    service: Service
    concurrency: int
    done_before: int = 0
    tokens: int = 0
    cached: int = 0

    def score(self, ledger: Ledger, progress: Progress) -> None:
        """Raises GaveUp, Refused or InputError; what is in the ledger by then is good."""
        self.done_before = ledger.done
        batches = self.route.batches(self.source.records(ledger.done))
        for found in in_order(self.ask, batches, self.concurrency):
            ledger.append(found.lines)
            self.tokens += found.tokens
            self.cached += found.cached
            progress.update(ledger.done, ledger.failed, self.tokens)

    def ask(self, batch: Sequence[Record]) -> Answered:
        """The batch's lines. Where an item might be at fault the batch is halved until that item is alone."""
        if batch[0].problem is not None:
            return Answered([self.route.failed(record, "invalid_record", record.problem or "") for record in batch])
        answer = self.service.ask(self.route.path, self.route.body(batch))
        if not isinstance(answer, Refusal):
            try:
                return Answered(self.route.lines(batch, answer), *self.route.tokens(answer))
            except (ValueError, TypeError, KeyError) as error:
                raise Refused(f"the service's answer is not one of {self.route.path}: {error}") from None
        if not self.route.of_items(answer):
            raise Refused(f"{answer.message} ({answer.status} {answer.code})")
        if len(batch) == 1:
            return Answered([self.route.failed(batch[0], answer.code, answer.message)])
        half = len(batch) // 2
        one, other = self.ask(batch[:half]), self.ask(batch[half:])
        return Answered(one.lines + other.lines, one.tokens + other.tokens, one.cached + other.cached)


def run(given: argparse.Namespace) -> int:
    started = time.monotonic()
    try:
        work = _prepare(given)
        stamp, terms = work.source.stamp(), {"input": work.source.fingerprint(), **work.route.terms()}
        total = work.source.count()
        ledger = Ledger(given.output, work.source.path, terms)
    except (InputError, LedgerError, ValueError, OSError) as error:
        return _complain(str(error), REFUSED)
    progress = Progress(total, ledger.done, None if given.no_progress else sys.stderr)
    try:
        status = _score(work, ledger, progress)
    finally:
        ledger.close()
        work.service.close()
    if status == ALL_SCORED and work.source.stamp() != stamp:
        return _complain(f"{given.input} has changed while it was read: the output mixes both.", REFUSED)
    if status == ALL_SCORED and ledger.failed:
        status = SOME_FAILED
    progress.end(ledger.failed)
    _summary(given, work, ledger, total, time.monotonic() - started, status)
    return status


def _score(work: Run, ledger: Ledger, progress: Progress) -> int:
    try:
        work.score(ledger, progress)
    except GaveUp as error:
        return _complain(f"{error} The same command goes on from here.", UNFINISHED)
    except (Refused, InputError) as error:
        return _complain(str(error), REFUSED)
    except OSError as error:  # of the files: the service's own are in GaveUp
        return _complain(f"{error} The same command goes on from here.", UNFINISHED)
    except KeyboardInterrupt:
        return _complain("interrupted. The same command goes on from here.", INTERRUPTED)
    return ALL_SCORED


def _prepare(given: argparse.Namespace) -> Run:
    """ValueError for options that contradict each other."""
    if given.output.resolve() == given.input.resolve():
        raise ValueError("`--output` must be another file than the input.")
    route = ROUTES[given.route](
        mapped=Mapped(
            item=given.item_field, query=given.query_field, continuations=given.continuations_field,
            id=given.id_field, fixed_query=given.query,
        ),
        labels=given.labels,
        label_token_ids=given.label_token_ids,
        template=given.template,
        fields=dict(given.set),
        most_items=given.batch_items,
    )  # fmt: skip
    service = Service(
        given.url, api_key=os.environ.get("ASSAY_API_KEY"), timeout_s=given.timeout, patience_s=given.patience
    )
    return Run(source=Source(given.input), route=route, service=service, concurrency=given.concurrency)


def _summary(given: argparse.Namespace, work: Run, ledger: Ledger, total: int, seconds: float, status: int) -> None:
    """Items and errors of the whole output; tokens, time and rate of this run."""
    now = ledger.done - work.done_before
    rate = now / seconds if seconds > 0 else 0.0
    if given.json:
        found = {
            "output": str(given.output),
            "items": total,
            "done": ledger.done,
            "errors": ledger.failed,
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
        f"{ledger.done:,} of {total:,} items in {given.output}, {ledger.failed:,} with errors. This run: "
        f"{now:,} items, {work.tokens:,} tokens ({work.cached:,} cached), {duration(seconds)}, {rate:,.0f} items/s, "
        f"{work.service.retries:,} retries.",
        file=sys.stderr,
    )


def _complain(words: str, status: int) -> int:
    print(f"assay score: {words}", file=sys.stderr)
    return status


def _texts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _field(text: str) -> tuple[str, Any]:
    try:
        return request_field(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1. Given: {number}.")
    return number

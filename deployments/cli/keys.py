"""Makes API keys and their entries for the configuration: `assay keys new NAME` and `assay keys hash NAME`."""

import argparse
import datetime
import json
import sys
from typing import Any, get_args

from pydantic import ValidationError

from deployments.auth.api_keys import Scope, digest_of, new_secret
from deployments.auth.key_args import KeyArgs
from deployments.cli.arguments import integer, number

MADE, REFUSED = 0, 2
MIN_CHARS = 32  # of a key that was made elsewhere: the hash of a short key can be guessed
ABOUT = """The key is shown once and stored nowhere. The printed line is an entry of `auth.keys` in the configuration or
in the file that `auth.keys_file` names."""


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("keys", help="make API keys", epilog=ABOUT)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    new = verbs.add_parser("new", help="make a key", epilog=ABOUT)
    new.set_defaults(run=_new)
    old = verbs.add_parser("hash", help="print the entry of an existing key, which is read from standard input")
    old.set_defaults(run=_hash)
    for verb in (new, old):
        option = verb.add_argument
        option("name", help="the client's name; keys with the same name share limits and cache")
        scopes = ", ".join(get_args(Scope))
        option("--scopes", default="inference", metavar="SCOPE,SCOPE", help=f"among {scopes} (%(default)s)")
        option("--days", type=number, help="days until the key expires; by default never")
        option("--max-inflight-requests", type=integer, metavar="N", help="requests in flight")
        option("--tokens-per-minute", type=integer, metavar="N", help="computed and generated tokens")
        option("--max-body-bytes", type=integer, metavar="N", help="bytes of a body")
        option("--min-priority", type=integer, metavar="N", help="smallest `priority`; lower is served earlier")
        option("--cache-domain", metavar="DOMAIN", help="names with the same domain share the prefix cache")


def _new(given: argparse.Namespace) -> int:
    secret = new_secret()
    about = f"Shown once. Give it to {given.name} as ASSAY_API_KEY, and this line to the server:"
    return _print_entry(given, secret.encode(), secret, about)


def _hash(given: argparse.Namespace) -> int:
    secret = sys.stdin.buffer.readline().strip()
    if len(secret) < MIN_CHARS:
        print(f"A key must have at least {MIN_CHARS} random characters. Given: {len(secret)}.", file=sys.stderr)
        return REFUSED
    return _print_entry(given, secret)


def _print_entry(given: argparse.Namespace, secret: bytes, shown: str = "", about: str = "") -> int:
    try:
        line = line_of(given, secret)
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED
    if shown:
        print(shown)
        print(about, file=sys.stderr)
    print(line)
    return MADE


def line_of(given: argparse.Namespace, secret: bytes) -> str:
    """Returns an entry of `auth.keys`, in YAML that is also JSON. Raises ValueError, which names the wrong option."""
    entry: dict[str, Any] = {
        "name": given.name,
        "sha256": digest_of(secret).hex(),
        "scopes": given.scopes.split(","),
    }
    if given.days is not None:
        if not 0 < given.days <= 36_500:
            raise ValueError(f"--days must be in (0, 36500]. Given: {given.days:g}.")
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=given.days)
        entry["expires"] = until.strftime("%Y-%m-%dT%H:%M:%SZ")
    options = ("max_inflight_requests", "tokens_per_minute", "max_body_bytes", "min_priority", "cache_domain")
    entry |= {name: value for name in options if (value := getattr(given, name)) is not None}
    try:
        KeyArgs.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ValueError(f"{option.replace('--name', 'NAME')}: {first['msg']}. Given: {first['input']}.") from None
    return "- " + json.dumps(entry)

"""Keys as an operator writes, makes and changes them; no secret is ever told."""

import argparse
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.auth.api_keys import PREFIX, KeyLimits, digest_of, new_secret
from deployments.auth.authenticator import Authenticator, open_to_world, refuse_open
from deployments.auth.key_reloader import KeyReloader
from deployments.auth.settings import AuthArgs
from deployments.cli.main import main
from deployments.config.app_args import AppArgs

SECRET = "assay-this-is-the-key-itself-and-not-its-hash-00"
HASH = digest_of(SECRET.encode()).hex()
OTHER = digest_of(b"other").hex()
ENTRY = {"name": "team", "sha256": HASH}


def keys(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"mode": "keys", "keys": list(entries), **more}


def named(access: Authenticator, secret: str = SECRET) -> str | None:
    try:
        return access.identify([(b"authorization", f"Bearer {secret}".encode())], "/v1/score").name
    except Exception:
        return None


# How they are written.


def test_an_entry_becomes_a_key() -> None:
    given = ENTRY | {
        "scopes": ["score", "metrics"], "expires": "2027-01-01T00:00:00+01:00", "tokens_per_minute": 5,
        "max_inflight_requests": 6, "max_body_bytes": 7, "min_priority": 8,
    }  # fmt: skip
    [key] = AppArgs.model_validate({"auth": keys(given)}).auth.settings(3).keys
    assert key.digest == digest_of(SECRET.encode()) and key.scopes == {"score", "metrics"}
    assert key.expires_at == 1798758000.0 and key.may("/v1/score") and not key.may("/v1/completions")
    assert key.limits == KeyLimits(
        max_inflight_requests=6, tokens_per_minute=5, max_body_bytes=7, min_priority=8
    )  # fmt: skip
    assert HASH not in repr(key) and str(key.digest) not in repr(key)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "keys"}, "`auth.keys` or `auth.keys_file` must be given"),
        ({"mode": "token"}, "'disabled' or 'keys'"),
        (keys({"name": "a", "sha256": "abc"}), "64 hexadecimal digits"),
        (keys({"name": "a", "sha256": HASH.upper()}), "in lower case"),
        (keys({"name": "a b", "sha256": HASH}), "without spaces"),
        (keys(ENTRY | {"scopes": []}), "at least 1"),
        (keys(ENTRY | {"scopes": ["admin"]}), "'inference', 'score', 'generate' or 'metrics'"),
        (keys(ENTRY | {"expires": "2027-01-01T00:00:00"}), "timezone"),
        (keys(ENTRY | {"tokens_per_minute": 0}), "greater than or equal to 1"),
        (keys(ENTRY | {"min_priority": -1001}), "greater than or equal to -1000"),
        (keys(ENTRY | {"max_requests": 1}), "max_requests"),
        (keys(ENTRY, {"name": "b", "sha256": HASH}), "`auth.keys[1].sha256` must be of a key of its own"),
        (keys(ENTRY, {"name": "team", "sha256": OTHER, "tokens_per_minute": 5}), "`auth.keys[1]` must have the limits"),
        (keys(ENTRY, public=["/v1/score"]), "public"),
    ],
)
def test_what_is_no_right_entry_refuses_to_start(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AppArgs.model_validate({"auth": given})
    assert words in str(refused.value) and "pattern" not in str(refused.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "a", "sha256": SECRET},
        {"name": "a", "key": SECRET},
        {"name": "a", "sha256": HASH, SECRET: 1},
        {"sha256": SECRET},
        {"name": "a", "sha256": [SECRET]},
        {"name": "a", "sha256": SECRET.encode()},
    ],
)
def test_a_key_in_the_wrong_place_is_not_repeated_in_the_error(entry: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as refused:
        AuthArgs.model_validate(keys(entry))
    shown = str(refused.value).replace(f"keys.0.{SECRET}", "")  # a name of a field is no secret
    assert SECRET not in shown and SECRET[:12] not in shown
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [entry]}))
    with pytest.raises(ValueError) as failed:
        AuthArgs(mode="keys", keys_file=str(file)).settings()
    assert SECRET not in str(failed.value).replace(f"keys.0.{SECRET}", "") and "`auth.keys_file`" in str(failed.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"keys: [\n" + SECRET.encode() + b": }", "must be YAML or JSON. Line 2"),
        (b"\xff\xfe" + SECRET.encode(), "readable text file: it is not UTF-8."),
        (b"- " + SECRET.encode(), "mapping with a list `keys`"),
        (b"", "mapping with a list `keys`"),
        (b"keys: []\nmode: keys", "mode"),
        (b"keys: !!python/object/apply:os.system ['true']", "must be YAML or JSON"),
        (b"#" * ((4 << 20) + 1), "at most 4194304 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_not_shown(text: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=r"`auth\.keys_file`") as refused:
        AuthArgs(mode="keys", keys_file=str(file)).settings()
    assert words in str(refused.value) and SECRET not in str(refused.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="readable text file: no such file or directory"):
        AuthArgs(mode="keys", keys_file="/nowhere/keys.yaml").settings()


# Changes while the service runs.


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    write(file, ENTRY)
    return file


def write(file: Path, *entries: dict[str, Any]) -> None:
    """Changes the file like a mounted secret: another file takes its name."""
    other = file.with_suffix(".new")
    other.write_text(yaml.safe_dump({"keys": list(entries)}))
    other.replace(file)


async def test_a_changed_file_takes_over_without_a_restart(file: Path, caplog: Any) -> None:
    access = Authenticator()
    watch = KeyReloader(AuthArgs(mode="keys", keys_file=str(file), keys=()), access, 1)
    assert (named(access), named(access, "other")) == ("team", None)
    write(file, ENTRY, {"name": "team", "sha256": OTHER})
    await watch.look()
    assert (named(access), named(access, "other")) == ("team", "team")
    write(file, {"name": "team", "sha256": OTHER})
    await watch.look()
    assert (named(access), named(access, "other")) == (None, "team")
    for spoil in (lambda: file.write_text(f"keys: {SECRET}"), lambda: os.remove(file)):
        spoil()
        await watch.look()
        await watch.look()
        assert named(access, "other") == "team"
    reported = [record.message for record in caplog.records if "former keys" in record.message]
    assert len(reported) == 2 and SECRET not in caplog.text
    write(file, ENTRY)
    await watch.look()
    assert named(access) == "team"


async def test_a_file_that_is_written_in_place_under_its_former_time_takes_over(file: Path) -> None:
    """As a copy that keeps times does: another hash has the same length."""
    access = Authenticator()
    watch = KeyReloader(AuthArgs(mode="keys", keys_file=str(file)), access, 1)
    before = file.stat()
    file.write_text(yaml.safe_dump({"keys": [ENTRY | {"sha256": OTHER}]}))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    await watch.look()
    assert (named(access), named(access, "other")) == (None, "team")


async def test_the_watch_looks_by_itself_and_ends(file: Path, until: Callable[..., Any]) -> None:
    access = Authenticator()
    watch = KeyReloader(AuthArgs(mode="keys", keys_file=str(file), reload_period_s=0.001), access, 1)
    watch.start()
    write(file, {"name": "new", "sha256": HASH})
    await until(lambda: named(access) == "new")
    os.remove(file)
    watch.use(AuthArgs.model_validate(keys({"name": "given", "sha256": HASH})))
    assert named(access) == "given"
    with pytest.raises(ValueError):
        watch.use(AuthArgs(mode="keys", keys_file=str(file)))
    assert named(access) == "given"
    await watch.stop()


async def test_keys_that_cannot_be_used_refuse_to_start(file: Path) -> None:
    file.write_text("keys: 1")
    with pytest.raises(ValueError, match="keys_file"):
        KeyReloader(AuthArgs(mode="keys", keys_file=str(file)), Authenticator(), 1)


# How they are made.


def test_a_new_key_is_shown_once_and_its_line_lets_it_in(capsys: Any) -> None:
    options = ["--scopes", "score,metrics", "--days", "2", "--tokens-per-minute", "9", "--min-priority", "1"]
    assert main(["keys", "new", "team", *options]) == 0
    secret, line = capsys.readouterr().out.splitlines()
    assert secret.startswith(PREFIX) and len(secret) == 49 and secret not in line
    [entry] = yaml.safe_load(line)
    assert json.loads(line.removeprefix("- ")) == entry
    access = Authenticator(AuthArgs.model_validate(keys(entry)).settings())
    assert named(access, secret) == "team" and named(access, secret[:-1]) is None
    assert entry["scopes"] == ["score", "metrics"] and entry["tokens_per_minute"] == 9 and "expires" in entry


def test_no_two_keys_are_alike() -> None:
    assert len({new_secret() for _ in range(1000)}) == 1000


def test_the_line_of_an_existing_key(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(text: bytes) -> int:
        monkeypatch.setattr("sys.stdin", argparse.Namespace(buffer=io.BytesIO(text)))
        return main(["keys", "hash", "team"])

    assert run(SECRET.encode() + b"\n") == 0
    [entry] = yaml.safe_load(capsys.readouterr().out)
    assert entry["sha256"] == HASH
    assert run(b"short\n") == 2 and "at least 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["a b"], "NAME"), (["a", "--scopes", "admin"], "--scopes"), (["a", "--days", "0"], "--days"),
        (["a", "--tokens-per-minute", "0"], "--tokens-per-minute"), (["a", "--days", "nan"], "--days"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_and_no_key_is_shown(options: list[str], words: str, capsys: Any) -> None:
    assert main(["keys", "new", *options]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and not shown.out


# Services without keys.


OWN_HOSTS = ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", None]
OPEN_HOSTS = ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "localhost.example.com", "127.0.0.1.example.com"]
OPEN_HOSTS += ["::ffff:10.0.0.1", "0", "127.1"]


@pytest.mark.parametrize(("host", "open_"), [(h, False) for h in OWN_HOSTS] + [(h, True) for h in OPEN_HOSTS])
def test_a_service_that_listens_to_the_world_asks_for_keys(host: str | None, open_: bool) -> None:
    assert open_to_world(host, "disabled") == open_ and not open_to_world(host, "keys")
    refuse_open(host, "keys", False)
    refuse_open(host, "disabled", True)
    if open_:
        with pytest.raises(ValueError, match=r"`auth\.mode` must be keys"):
            refuse_open(host, "disabled", False)
    else:
        refuse_open(host, "disabled", False)

"""Defines the section `auth`: API keys, stored as hashes only."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from deployments.auth.api_keys import KeyLimits
from deployments.auth.authenticator import AuthSettings
from deployments.auth.key_args import KeyArgs
from deployments.section import Seconds, Section, why_unreadable

Public = Literal["/healthz", "/readyz", "/health", "/version", "/metrics", "/openapi.json"]
MAX_KEYS = 4096
MAX_FILE_BYTES = 4 << 20


class KeysFile(Section):
    """Defines the content of `auth.keys_file`."""

    keys: tuple[KeyArgs, ...] = Field(max_length=MAX_KEYS)


class AuthArgs(Section):
    """Configures authentication. Keys and their limits can be changed while the service runs."""

    mode: Literal["disabled", "keys"] = "disabled"
    """`disabled`: every request is allowed, so that the port must be open to this machine only."""
    keys: tuple[KeyArgs, ...] = Field(default=(), max_length=MAX_KEYS)
    """API keys."""
    keys_file: str | None = None
    """A YAML or JSON file with more `keys`, such as a mounted secret. Every ingress reads it, and again when it has
    changed. If a changed file cannot be used, the former keys stay in force and the log says why."""
    reload_period_s: Seconds = 10.0
    """Time between two checks of the file, in seconds."""
    public: tuple[Public, ...] = ("/healthz", "/readyz", "/health")
    """Routes that need no key."""
    allow_open: bool = False
    """Allows `disabled` where other machines reach the port, as behind a gateway that checks keys itself."""

    @model_validator(mode="after")
    def _has_keys(self) -> Self:
        if self.mode == "keys" and not (self.keys or self.keys_file):
            raise ValueError("`auth.keys` or `auth.keys_file` must be given with `auth.mode: keys`. Given: neither.")
        return self

    @field_validator("keys")
    @classmethod
    def _agree(cls, keys: tuple[KeyArgs, ...]) -> tuple[KeyArgs, ...]:
        check_keys(keys)
        return keys

    def settings(self, ingresses: int = 1) -> AuthSettings:
        """Returns the keys, with those of the file. Raises ValueError, which repeats no part of the file."""
        listed = self.keys
        if self.mode == "keys" and self.keys_file is not None:
            listed = (*listed, *read_keys(Path(self.keys_file)))
            check_keys(listed)
        return AuthSettings(
            mode=self.mode,
            keys=tuple(one.key() for one in listed),
            public=frozenset(self.public),
            ingresses=ingresses,
        )


class UserConfig(Section):
    """Defines the `user_config` of the deployment Ingress: what changes without a rollout."""

    auth: AuthArgs | None = None


def check_keys(keys: Iterable[KeyArgs]) -> None:
    """Raises ValueError for a key that is listed twice, and for a name with different limits."""
    digests: set[str] = set()
    named: dict[str, tuple[KeyLimits, str | None]] = {}
    for index, one in enumerate(keys):
        if one.sha256 in digests:
            raise ValueError(f"`auth.keys[{index}].sha256` must be of a key of its own. Given: that of another entry.")
        digests.add(one.sha256)
        own = (one.limits(), one.cache_domain)
        if named.setdefault(one.name, own) != own:
            raise ValueError(
                f"`auth.keys[{index}]` must have the limits and the cache domain of the other keys of its name. "
                "Given: others."
            )


def read_keys(file: Path) -> tuple[KeyArgs, ...]:
    """Reads a file of keys. Raises ValueError, which says what is wrong and where, and repeats no value."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"`auth.keys_file` must be at most {MAX_FILE_BYTES} bytes.")
        found = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`auth.keys_file` must be a readable text file: {why_unreadable(error)}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" Line {mark.line + 1} is not."
        raise ValueError(f"`auth.keys_file` must be YAML or JSON.{where}") from None
    try:
        return KeysFile.model_validate(found).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        why = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise ValueError(f"`auth.keys_file` must be a mapping with a list `keys`. {where}: {why}.") from None

"""Who may ask: API keys, of which only hashes are written down."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator

from deployments.auth.api_keys import DIGEST, Key, KeyLimits, Scope, domain_of
from deployments.auth.authenticator import AuthSettings
from deployments.config.sections import Name, Seconds, Section
from deployments.limits import PRIORITIES

Public = Literal["/healthz", "/readyz", "/health", "/version", "/metrics", "/openapi.json"]
MAX_KEYS = 4096
MAX_FILE_BYTES = 4 << 20
HIDDEN = "(not shown)"


class KeyArgs(Section):
    """One key, as `assay keys new NAME` prints it. What it may do is bounded by its scopes and limits."""

    name: Name
    """Whose it is. Several keys may have one name, as while a new one takes over from an old one: then they share their
    limits, which must be the same, and their part of the prefix cache. Appears in no metric and no answer."""
    sha256: str = Field(pattern=f"^{DIGEST.pattern}$")
    """SHA-256 of the key, 64 hexadecimal digits. The key itself is nowhere."""
    scopes: tuple[Scope, ...] = Field(default=("inference",), min_length=1)
    """`score`: the scoring routes; `generate`: completions and chat; `inference`: both; `metrics`: /metrics. The small
    routes are open to each of the first three."""
    expires: AwareDatetime | None = None
    """The key is refused from then on: a time with its zone, as 2027-01-31T00:00:00Z."""
    cache_domain: Name | None = None
    """Names of one domain share the prefix cache, and can tell by the time of an answer what another of them has asked.
    None: the name's own."""
    max_inflight_requests: int | None = Field(default=None, ge=1, le=1 << 20)
    """Of the name, over all ingresses; each enforces its share, rounded up. One more is refused with 429."""
    tokens_per_minute: int | None = Field(default=None, ge=1, le=1 << 40)
    """Computed and generated, of the name, over all ingresses; a minute's worth can be saved up. When they are spent
    requests are refused with 429."""
    max_body_bytes: int | None = Field(default=None, ge=1, le=1 << 40)
    """Where it is less than the server's."""
    min_priority: int = Field(default=PRIORITIES[0], ge=PRIORITIES[0], le=PRIORITIES[1])
    """The most urgent priority that a request may ask for; a lower number is served earlier."""

    @model_validator(mode="before")
    @classmethod
    def _tells_no_secret(cls, given: Any) -> Any:
        """Whoever writes the key where its hash belongs must not find it in an error message, nor in a log."""
        if not isinstance(given, dict):
            return given
        shown = {name: value if name in cls.model_fields else HIDDEN for name, value in given.items()}
        digest = shown.get("sha256")
        if "sha256" in shown and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
            shown["sha256"] = HIDDEN
        return shown

    def key(self) -> Key:
        return Key(
            name=self.name,
            digest=bytes.fromhex(self.sha256),
            scopes=frozenset(self.scopes),
            expires_at=math.inf if self.expires is None else self.expires.timestamp(),
            domain=domain_of(self.cache_domain or self.name),
            limits=self.limits(),
        )

    def limits(self) -> KeyLimits:
        return KeyLimits(
            max_inflight_requests=self.max_inflight_requests,
            tokens_per_minute=self.tokens_per_minute,
            max_body_bytes=self.max_body_bytes,
            min_priority=self.min_priority,
        )


class KeysFile(Section):
    """What stands in `auth.keys_file`."""

    keys: tuple[KeyArgs, ...] = Field(max_length=MAX_KEYS)


class AuthArgs(Section):
    """Who may ask. Keys and their limits can be changed while the service runs."""

    mode: Literal["disabled", "keys"] = "disabled"
    """`disabled`: everybody who reaches the port may do everything, so the port must be this machine's alone."""
    keys: tuple[KeyArgs, ...] = Field(default=(), max_length=MAX_KEYS)
    keys_file: str | None = None
    """A YAML or JSON file with more `keys`, such as a mounted secret: read by every ingress, and again when it has
    changed. A changed file that cannot be used leaves the former keys in force, and the log says why."""
    reload_s: Seconds = 10.0
    """How often the file is looked at."""
    public: tuple[Public, ...] = ("/healthz", "/readyz", "/health")
    """Routes that need no key."""
    allow_open: bool = False
    """`disabled` where others than this machine reach the port, as behind a gateway that asks for keys itself."""

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
        """Reads the file, where there is one. Raises ValueError, which shows no part of it."""
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
    """The `user_config` of the deployment Ingress: what changes without a rollout."""

    auth: AuthArgs | None = None


def check_keys(keys: Iterable[KeyArgs]) -> None:
    """Raises ValueError for a key that stands twice, and for one name with two sets of limits."""
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
    """Raises ValueError naming what is wrong and where, never what stands there."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"`auth.keys_file` must be at most {MAX_FILE_BYTES} bytes.")
        found = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`auth.keys_file` must be a readable text file. {type(error).__name__}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" Line {mark.line + 1} is not."
        raise ValueError(f"`auth.keys_file` must be YAML or JSON.{where}") from None
    try:
        return KeysFile.model_validate(found).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"`auth.keys_file` must be a mapping with a list `keys`. {where}: {first['msg']}.") from None

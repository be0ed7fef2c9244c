"""The Serve deployment's part: where it refuses to start, and how its `user_config` changes the keys."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from deployments import app
from deployments.auth.api_keys import digest_of
from deployments.auth.authenticator import Authenticator
from deployments.auth.key_reloader import KeyReloader
from deployments.auth.settings import AuthArgs

SECRET = "assay-this-is-the-key-itself-and-not-its-hash-00"
KEYED = {"mode": "keys", "keys": [{"name": "team", "sha256": digest_of(SECRET.encode()).hex()}]}


@pytest.fixture
def ingress() -> Any:
    """Returns what `reconfigure` needs of one: its constructor needs a cluster."""
    access = Authenticator()
    old = {"mode": "keys", "keys": [{"name": "old", "sha256": "0" * 64}]}
    args = AuthArgs.model_validate(old)
    keys = KeyReloader(args, access, 1)

    async def reconfigure(user_config: dict[str, Any]) -> None:
        await app.Ingress.reconfigure(made, user_config)

    made: Any = SimpleNamespace(_args=SimpleNamespace(auth=args), _access=access, _keys=keys, reconfigure=reconfigure)
    return made


def named(access: Authenticator) -> str:
    return access.identify([(b"authorization", f"Bearer {SECRET}".encode())], "/v1/score").name


async def test_user_config_takes_the_place_of_the_keys(ingress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_listening_host", lambda: "0.0.0.0")
    await ingress.reconfigure({})
    with pytest.raises(Exception, match="not one of this server's"):
        named(ingress._access)
    await ingress.reconfigure({"auth": KEYED})
    assert named(ingress._access) == "team"
    for bad in ({"auth": {"mode": "keys"}}, {"aut": KEYED}, {"auth": KEYED | {"mode": "none"}}):
        with pytest.raises(ValidationError):
            await ingress.reconfigure(bad)
    assert named(ingress._access) == "team"
    await ingress.reconfigure({})
    with pytest.raises(Exception, match="not one of this server's"):
        named(ingress._access)


async def test_user_config_cannot_open_the_service_to_the_world_by_mistake(
    ingress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_listening_host", lambda: "0.0.0.0")
    with pytest.raises(ValueError, match=r"`auth\.mode` must be keys"):
        await ingress.reconfigure({"auth": {"mode": "disabled"}})
    assert ingress._access.mode == "keys"
    await ingress.reconfigure({"auth": {"mode": "disabled", "allow_open": True}})
    assert ingress._access.mode == "disabled"

"""The fixtures of these tests, each from the module of what it makes."""

from collections.abc import Iterator
from functools import lru_cache

import pytest

from scoring.prompts.sandbox import compile_source
from tests.deployments.clients import app as app
from tests.deployments.clients import client as client
from tests.deployments.clients import client_of as client_of
from tests.deployments.clients import make_client as make_client
from tests.deployments.clients import sdk_of as sdk_of
from tests.deployments.clients import settings as settings
from tests.deployments.fleets import make_fleet as make_fleet
from tests.deployments.fleets import path as path
from tests.deployments.replicas import backend_of as backend_of
from tests.deployments.replicas import held_fixture as held_fixture
from tests.deployments.replicas import replica_backend as replica_backend
from tests.deployments.replicas import replica_client as replica_client
from tests.deployments.replicas import replica_servers as replica_servers
from tests.deployments.scripted import backend as backend
from tests.deployments.scripted import label_logprob_fixture as label_logprob_fixture
from tests.deployments.wires import wire as wire
from tests.deployments.wires import wire_to as wire_to


@pytest.fixture(scope="session", autouse=True)
def sources_compiled_once() -> Iterator[None]:
    """Prompt templates of one source are compiled once: thousands of these tests build an app, with a dozen presets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scoring.prompts.templates.compile_source", lru_cache(maxsize=None)(compile_source))
        yield

"""assay env: what it tells, and what it must never tell."""

import json

import pytest

from deployments.cli.launch import system_info
from deployments.cli.main import main

PLANTED = "s3cr3t-Zq8vXw4TnB2kLm7R"
VARIABLES = {
    "RAY_AUTH_TOKEN": PLANTED,
    "HF_TOKEN": PLANTED,
    "ASSAY_API_KEY": PLANTED,
    "ASSAY_NOTE": PLANTED,  # a name that says nothing
    "RAY_ADDRESS": f"http://user:{PLANTED}@10.0.0.1:6379",
    "https_proxy": f"http://{PLANTED}@proxy:3128",
    "HTTP_PROXY": f"http://proxy?token={PLANTED}",
    "RAY_RUNTIME_ENV": json.dumps({"env_vars": {"X": PLANTED}}),
    "PYTHONPATH": f"/srv/{PLANTED}",
    "CUDA_VISIBLE_DEVICES": f"0,{PLANTED}",
    "RAY_REDIS_PASSWORD": "123456",
    "RAY_NAME": "café ☕",
    "UNRELATED": PLANTED,
}


def test_a_planted_secret_is_nowhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    for arguments in (["env"], ["env", "--json"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert PLANTED not in out and "123456" not in out and "UNRELATED" not in out
        assert f"(not shown: {len(PLANTED)} characters)" in out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", "0,1"), ("OMP_NUM_THREADS", "2"), ("RAY_AUTH_MODE", "token"), ("HF_HUB_OFFLINE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"), ("LD_LIBRARY_PATH", "/usr/lib:/opt/cuda/lib64"), ("RAY_X", "0.5"),
    ],
)  # fmt: skip
def test_what_helps_and_harms_no_one_is_shown(name: str, value: str) -> None:
    assert system_info.shown(name, value) == value


@pytest.mark.parametrize(
    ("path", "reported"),
    [
        ("/opt/conda/envs/assay311/lib/python3.11/site-packages", True),
        ("/srv/0123456789abcdef0123", False),
        ("/srv/Zq8vXw4TnB2k:/usr", False),
    ],
)
def test_a_path_is_reported_unless_a_part_of_it_looks_like_a_token(path: str, reported: bool) -> None:
    assert (system_info.shown("PYTHONPATH", path) == path) is reported


def test_the_home_folder_is_reported_without_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert system_info.shown("PYTHONPATH", "/home/ada/lib") == "~/lib"


def test_versions_machine_and_commit_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["ray"].startswith("2.") and found["machine"]["cpus"] >= 1
    assert set(found) == {"versions", "machine", "gpus", "caches", "variables", "commit"}


def test_a_cache_is_counted(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "a").write_bytes(b"x" * (1 << 20))
    found = system_info.caches({"TRITON_CACHE_DIR": str(folder), "HF_HUB_CACHE": str(folder / "none")})
    assert (found["Triton"], found["Hugging Face hub"]) == ("1 files, 1.0 MiB", "none")

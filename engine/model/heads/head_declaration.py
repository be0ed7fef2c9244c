"""Reads the declaration of a head: a YAML or JSON file that says which tensors make a head, and what it reads.

It is for heads that neither transformers nor sentence-transformers has a class for. The file is data: nothing that it
names is imported.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from engine.model.heads.info import HeadKind, ProblemType

MAX_LABELS = 1 << 16
MAX_BYTES = 1 << 20  # of the file
FIELDS = ("head", "reads", "mark", "weights", "tensors", "labels", "problem_type", "temperature", "norm_eps")
READS = ("last", "mean", "cls", "marked")
ROLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # by `head`: tensors that it needs, and may have
    "linear": (("weight",), ("bias",)),
    "layernorm_linear": (("norm_weight", "weight"), ("norm_bias", "bias")),
    "pointer": (("query_weight", "key_weight"), ("query_bias", "key_bias")),
}


class BadDeclaration(ValueError):
    """The file that `model.head` names declares no head that this build computes."""


class HeadDeclaration(NamedTuple):
    """Holds what a file declares. All fields are plain values, as those of a configuration of transformers are."""

    file: str
    head: str  # a key of ROLES
    reads: str  # one of READS
    mark: str | None  # text of the token whose places are read
    weights: str | None  # a safetensors file; None: the model's own
    tensors: tuple[tuple[str, str], ...]  # (role, name in the file)
    labels: tuple[str, ...]
    problem_type: ProblemType | None
    temperature: float
    norm_eps: float

    @property
    def kind(self) -> HeadKind:
        """Returns the kind of head that answers: what it reads decides it."""
        if self.head == "pointer":
            return HeadKind.POINTER
        return HeadKind.TOKEN if self.reads == "marked" else HeadKind.SEQUENCE


def read_declaration(file: Path) -> HeadDeclaration:
    """Reads a declaration and checks its fields. `file`: YAML or JSON.

    Raises:
        BadDeclaration: The file cannot be read, or a field is missing, unknown or out of range.
    """
    given = _mapping(file)
    unknown = [str(name) for name in given if name not in FIELDS]
    if unknown:
        raise _bad(file, unknown[0], f"absent: the fields are {', '.join(FIELDS)}", "given")
    head = _one_of(file, given, "head", tuple(ROLES))
    if head == "pointer":
        for name in ("reads", "labels", "problem_type"):
            _absent(file, given, name, "a pointer answers with a number for each marked token")
    if head != "layernorm_linear":
        _absent(file, given, "norm_eps", "the head has no layer norm")
    reads = "marked" if head == "pointer" else _one_of(file, given, "reads", READS)
    if reads != "marked":
        _absent(file, given, "mark", f"the head reads {reads}")
    return HeadDeclaration(
        file=str(file),
        head=head,
        reads=reads,
        mark=_text(file, given, "mark") if reads == "marked" else None,
        weights=_weights(file, given),
        tensors=_tensors(file, given, head),
        labels=_labels(file, given),
        problem_type=_problem_type(file, given),
        temperature=_positive(file, given, "temperature", 1.0),
        norm_eps=_positive(file, given, "norm_eps", 1e-5),
    )


def _mapping(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise BadDeclaration(
            "`model.head` must be auto, lm, sequence, token, pooled, or a file that declares a head. "
            f"Given: {file}, and there is no such file."
        )
    if file.stat().st_size > MAX_BYTES:
        raise BadDeclaration(f"`model.head`: {file} must have at most {MAX_BYTES} bytes.")
    try:
        found = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise BadDeclaration(
            f"`model.head`: {file} must be YAML or JSON: {' '.join(str(error).split())[:200]}."
        ) from None
    if not isinstance(found, dict):
        raise BadDeclaration(f"`model.head`: {file} must be a mapping. Given: {type(found).__name__}.")
    return found


def _bad(file: Path, name: str, must: str, given: object) -> BadDeclaration:
    return BadDeclaration(f"`model.head`: `{name}` in {file} must be {must}. Given: {given}.")


def _absent(file: Path, given: Mapping[str, Any], name: str, why: str) -> None:
    if name in given:
        raise _bad(file, name, f"absent: {why}", given[name])


def _one_of(file: Path, given: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    found = given.get(name)
    if found not in allowed:
        raise _bad(file, name, f"one of {', '.join(allowed)}", "nothing" if found is None else found)
    return str(found)


def _text(file: Path, given: Mapping[str, Any], name: str) -> str:
    found = given.get(name)
    if not isinstance(found, str) or not found:
        raise _bad(file, name, "a text", "nothing" if found is None else repr(found))
    return found


def _weights(file: Path, given: Mapping[str, Any]) -> str | None:
    if given.get("weights") is None:
        return None
    found = _text(file, given, "weights")
    if not found.endswith(".safetensors"):
        raise _bad(file, "weights", "a *.safetensors file, or absent for the model's own", found)
    return str(file.parent / found)


def _tensors(file: Path, given: Mapping[str, Any], head: str) -> tuple[tuple[str, str], ...]:
    found = given.get("tensors")
    needed, optional = ROLES[head]
    wanted = f"a mapping from {', '.join(needed)}, and perhaps {', '.join(optional)}, to names of tensors"
    if not isinstance(found, dict):
        raise _bad(file, "tensors", wanted, "nothing" if found is None else type(found).__name__)
    wrong = [str(role) for role in found if role not in needed + optional] + [one for one in needed if one not in found]
    names = list(found.values())
    if wrong or not all(isinstance(name, str) and name for name in names):
        raise _bad(file, "tensors", wanted, ", ".join(map(str, found)) or "an empty one")
    if len(set(names)) < len(names):
        raise _bad(file, "tensors", "different tensors", "one twice")
    return tuple((str(role), str(name)) for role, name in found.items())


def _labels(file: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    found = given.get("labels")
    if found is None:
        return ()
    good = isinstance(found, list) and 0 < len(found) <= MAX_LABELS and all(isinstance(one, str) for one in found)
    if not good or len(set(found)) < len(found):
        raise _bad(file, "labels", f"a list of 1 to {MAX_LABELS} different texts", str(found)[:100])
    return tuple(found)


def _problem_type(file: Path, given: Mapping[str, Any]) -> ProblemType | None:
    found = given.get("problem_type")
    for known in get_args(ProblemType):
        if found == known:
            known_type: ProblemType = known
            return known_type
    if found is not None:
        raise _bad(file, "problem_type", f"one of {', '.join(get_args(ProblemType))}", found)
    return None


def _positive(file: Path, given: Mapping[str, Any], name: str, default: float) -> float:
    found = given.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
        raise _bad(file, name, "a number over 0", found)
    return float(found)

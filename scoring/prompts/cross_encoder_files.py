"""Reads the files with which sentence-transformers describes a reranker, as data: nothing that they name is imported.

`modules.json` lists the chain of modules, `1_LogitScore/config.json` the tokens whose logits are the score,
`sentence_bert_config.json` how messages are written, `config_sentence_transformers.json` the prompts and the
activation.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MAX_FILE_BYTES = 1 << 22
TRANSFORMER, LOGIT_SCORE = "Transformer", "LogitScore"
PACKAGE = "sentence_transformers."
ACTIVATIONS: dict[str, "ScoreActivation"] = {  # by the names that files give them
    "torch.nn.Identity": "none",
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
ScoreActivation = Literal["none", "sigmoid", "softmax"]


class UnknownLayout(ValueError):
    """The files name something that this service does not implement. The message names the file and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEncoderFiles:
    """Holds what the files say of a reranker."""

    token_ids: tuple[int, ...] = ()  # (true, false) or (true,) of LogitScore; empty: the model's own head scores
    instruction: str | None = None  # the text of the default prompt
    activation: ScoreActivation | None = None  # None: the files do not say
    structured: bool | None = None  # contents are lists of parts, else strings; None: the files do not say
    template_values: dict[str, Any] = field(default_factory=dict)  # values for the chat template


def read_cross_encoder(folder: Path) -> CrossEncoderFiles | None:
    """Reads a model's folder.

    Args:
        folder: The model's files.

    Returns:
        The description; None for a folder without `modules.json`.

    Raises:
        UnknownLayout: A file cannot be read, or names a module, an activation or a prompt that is not known.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = _modules(folder)
    names = [name for name, _ in modules]
    if names not in ([TRANSFORMER], [TRANSFORMER, LOGIT_SCORE]):
        raise UnknownLayout(f"modules.json must be a Transformer, and a LogitScore or nothing. Given: {names}.")
    body, score = folder / modules[0][1], folder / modules[-1][1]
    wording = _object(folder / "config_sentence_transformers.json")
    writing = _object(body / "sentence_bert_config.json")
    form = _part(_part(writing, "modality_config"), "message").get("format", "auto")
    if form not in ("structured", "flat", "auto"):
        raise UnknownLayout(f"`format` of sentence_bert_config.json must be structured, flat or auto. Given: {form!r}.")
    values = _part(_part(writing, "processing_kwargs"), "chat_template")
    return CrossEncoderFiles(
        token_ids=_token_ids(score) if LOGIT_SCORE in names else (),
        instruction=_default_prompt(wording),
        activation=_activation(wording, _object(folder / "config.json")),
        structured=None if form == "auto" else form == "structured",
        template_values={name: value for name, value in values.items() if name != "restore_suffix"},
    )


def declared_activation(folder: Path) -> ScoreActivation | None:
    """Returns the activation that config.json names, as it does for cross-encoders that have no `modules.json`.

    Raises:
        UnknownLayout: It is not known.
    """
    return _activation({}, _object(folder / "config.json"))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Returns the class name and the folder of each module, in the order of the chain."""
    found = _read(folder / "modules.json")
    modules = []
    for one in found if isinstance(found, list) else [None]:
        kind, path = (one.get("type"), one.get("path", "")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise UnknownLayout("modules.json must be a list of objects with `type` and `path`.")
        if not kind.startswith(PACKAGE):
            raise UnknownLayout(f"modules.json names {kind!r}, which is not a module of sentence-transformers.")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise UnknownLayout(f"`path` in modules.json must be inside the model's folder. Given: {path!r}.")
        modules.append((kind.rpartition(".")[2], path))
    return modules


def _token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the ids of yes and no, whose difference of logits is the score, or of yes alone, whose logit it is."""
    found = _object(folder / "config.json")
    true, false = found.get("true_token_id"), found.get("false_token_id")
    ids = (true,) if false is None else (true, false)
    if any(not isinstance(one, int) or isinstance(one, bool) or one < 0 for one in ids) or true == false:
        raise UnknownLayout(
            f"LogitScore must have a `true_token_id`, and another `false_token_id` or null. Given: {true!r} and "
            f"{false!r}."
        )
    return tuple(int(str(one)) for one in ids)


def _default_prompt(wording: dict[str, Any]) -> str | None:
    name, prompts = wording.get("default_prompt_name"), _part(wording, "prompts")
    if name is None:
        return None
    if not isinstance(prompts.get(name), str):
        raise UnknownLayout(f"`default_prompt_name` must be one of {sorted(prompts)}. Given: {name!r}.")
    return str(prompts[name])


def _activation(wording: dict[str, Any], config: dict[str, Any]) -> ScoreActivation | None:
    places = (
        wording.get("activation_fn"),
        _part(config, "sentence_transformers").get("activation_fn"),
        config.get("sbert_ce_default_activation_function"),
    )
    name = next((one for one in places if one is not None), None)
    if name is None:
        return None
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnknownLayout(f"`activation_fn` must be one of {', '.join(ACTIVATIONS)}. Given: {name!r}.")
    return ACTIVATIONS[name]


def _part(found: dict[str, Any], name: str) -> dict[str, Any]:
    part = found.get(name)
    if part is not None and not isinstance(part, dict):
        raise UnknownLayout(f"`{name}` must be an object. Given: {type(part).__name__}.")
    return part or {}


def _object(file: Path) -> dict[str, Any]:
    """Returns the object that a file holds, an empty one for a file that is missing."""
    found = _read(file) if file.is_file() else {}
    if not isinstance(found, dict):
        raise UnknownLayout(f"{file.name} must be a JSON object. Given: {type(found).__name__}.")
    return found


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UnknownLayout(f"{file.name} must be at most {MAX_FILE_BYTES} bytes.")
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UnknownLayout):
            raise
        raise UnknownLayout(f"{file.name} must be JSON in UTF-8.") from None

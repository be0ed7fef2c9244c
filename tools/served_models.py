"""Lists what this build serves, from the models that the tests hold against their references.

    python -m tools.served_models            rewrites deployments/cli/served_models.json and the table of
                                             docs/guides/which-models.md
    python -m tools.served_models --check    exits with 1 if one of them is not current

An architecture is listed if a test compares it with the library, and start-up does not refuse it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from deployments.cli.models import COLUMNS, FILE, SupportedModel
from engine.model.architectures import PROCESS_REWARD, find_kind
from engine.model.compatibility import UnsupportedModel
from engine.model.heads.head_declaration import ROLES
from tests.deployments.api.test_published_layouts import GUARDS, LAYOUTS, Layout
from tests.engine.model.conftest import CONFIGS
from tests.engine.model.encoder.conftest import ENCODERS
from tests.engine.model.heads import test_declared_heads as declared
from tests.support.head_models import FAMILIES, config_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "which-models.md"
BEGIN, END = "<!-- table: python -m tools.served_models -->\n", "<!-- end of table -->\n"
LM, SEQUENCE, TOKEN, POOLED = "language model", "sequence", "token", "pooled"
ENCODER_PROMPT = "none: the tokenizer writes pairs"
DECLARED = f"declared: {', '.join(ROLES)}"
PROMPTS = {
    LM: "rerank.template",
    SEQUENCE: "rerank.template, or the repository's; conversations need none",
    TOKEN: "none: it does not rank",
    POOLED: "none needed: the cosine of two vectors",
    DECLARED: "rerank.template, for a head of one number",
}
TESTS = {
    "causal": "tests/engine/model/test_compile.py",
    "sequence": "tests/engine/model/heads/test_sequence_heads.py",
    "token": "tests/engine/model/heads/test_token_heads.py",
    "encoder": "tests/engine/model/encoder/test_encoder_model.py",
    "vectors": "tests/deployments/test_encoders.py",
    "declared": "tests/engine/model/heads/test_declared_heads.py",
    "layout": "tests/deployments/api/test_published_layouts.py",
}


def served_models() -> list[SupportedModel]:
    """Returns the rows: published layouts first, then architectures by head."""
    sequence = {name: (lambda name=name: config_of(name)) for name in FAMILIES}
    return [
        *_layouts(LAYOUTS),
        *_layouts(GUARDS),
        *_architectures(CONFIGS, AutoModelForCausalLM, LM, TESTS["causal"]),
        *_architectures(sequence, AutoModelForSequenceClassification, SEQUENCE, TESTS["sequence"]),
        *_architectures(sequence, AutoModelForTokenClassification, TOKEN, TESTS["token"]),
        SupportedModel(PROCESS_REWARD, TOKEN, PROMPTS[TOKEN], TESTS["token"]),
        *_architectures(ENCODERS, AutoModelForSequenceClassification, SEQUENCE, TESTS["encoder"], ENCODER_PROMPT),
        *_architectures(ENCODERS, AutoModel, POOLED, TESTS["encoder"]),
        *_architectures({"qwen3": lambda: config_of("qwen3")}, AutoModel, POOLED, TESTS["vectors"]),
        *_architectures(
            {name: partial(config_of, name) for name in declared.FAMILIES},
            AutoModelForCausalLM,
            DECLARED,
            TESTS["declared"],
        ),
    ]


def _layouts(layouts: Mapping[str, Layout]) -> Iterator[SupportedModel]:
    for name, layout in layouts.items():
        rerank = layout.configured.get("rerank", {})
        if layout.files:
            source = "repository (sentence-transformers)"
        elif "method" in rerank:
            source = f"rerank.template: {rerank['template']}, rerank.method: {rerank['method']}"
        elif rerank:
            source = f"rerank.template: {rerank['template']}"
        else:
            source = f"chat template, template: {name}"
        yield SupportedModel(
            _class_name(AutoModelForCausalLM, layout.config()), LM, source, f"{TESTS['layout']}[{name}]"
        )


def _architectures(
    configs: Mapping[str, Callable[[], Any]], auto: Any, head: str, test: str, prompt: str | None = None
) -> Iterator[SupportedModel]:
    """Yields each architecture of a test once, if it is served. `prompt`: in place of that of its head."""
    names: dict[str, None] = {}
    for make in configs.values():
        config = make()
        if type(config) not in auto._model_mapping:
            continue
        config.architectures = [_class_name(auto, config)]
        try:
            find_kind(config)
        except UnsupportedModel:
            continue
        names[config.architectures[0]] = None
    for name in sorted(names):
        yield SupportedModel(name, head, prompt or PROMPTS[head], test)


def _class_name(auto: Any, config: Any) -> str:
    return str(auto._model_mapping[type(config)].__name__)


def contents() -> dict[Path, str]:
    """Returns the files that are generated, and their texts."""
    rows = served_models()
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| `{row.architecture}` | {row.head} | {row.prompt} | `{row.test}` |" for row in rows]
    table = "\n".join(lines)
    return {
        FILE: json.dumps([row._asdict() for row in rows], indent=1) + "\n",
        PAGE: f"{before}{BEGIN}\n{table}\n\n{END}{after}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the files; returns the exit status."""
    parser = argparse.ArgumentParser(description="Lists what this build serves, from its tests.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is not current")
    check = parser.parse_args(arguments).check
    stale = [file for file, text in contents().items() if not file.is_file() or file.read_text("utf-8") != text]
    for file in stale:
        if not check:
            file.write_text(contents()[file], "utf-8")
        print(f"{file.relative_to(ROOT)} {'is not current' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

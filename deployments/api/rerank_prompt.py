"""Chooses at start-up the prompt of the rerank routes, and says where it comes from.

It comes from the configuration, from what the model's repository says of itself, or from a preset whose text the
repository's chat template writes. Otherwise there is none: a guessed prompt gives scores that look right.
"""

import json
from dataclasses import replace
from typing import NamedTuple

from deployments.config.settings import ApiSettings
from engine.tokenizer.tokenizer import Tokenizer
from scoring.prompts.cross_encoder_files import (
    CrossEncoderFiles,
    ScoreActivation,
    UnknownLayout,
    declared_activation,
    read_cross_encoder,
)
from scoring.prompts.pair_template import PairRenderer, Unwritable, matching_preset, pair_spec
from scoring.prompts.templates import PRESETS, Template, TemplateRefused, TemplateSpec
from scoring.rerank import MAX_LABELS, rerank_template
from scoring.tokenizer_protocol import TokenizerProtocol

CONFIGURATION, REPOSITORY = "configuration", "repository"
NO_PROMPT = "its repository has no chat template with the roles query and document"
NO_TOKENS = "its chat template writes a query and a document, and nothing says which tokens make the score"
MODELS = {  # that presets are made for
    "builtin": "the built-in model",
    "qwen3_reranker": "Qwen3-Reranker",
    "mxbai_rerank_v2": "mxbai-rerank-v2",
    "bge_reranker_v2_gemma": "bge-reranker-v2-gemma",
    "ctxl": "ctxl-rerank-v2",
    "zerank": "zerank",
}


OWN = tuple(  # examples of texts; the first whose labels are single tokens is shown
    TemplateSpec(prefix="Query: {{ query }}\nDocument: ", suffix=suffix, labels=labels)
    for suffix, labels in (("\nRelevant:", (" yes", " no")), ("\nRelevant: ", ("yes", "no")), ("\n", ("1", "0")))
)


class RerankPrompt(NamedTuple):
    """Holds the prompt of the rerank routes."""

    template: Template | None
    source: str | None  # `configuration`, `repository` or `preset:NAME`; None without a template
    activation: ScoreActivation | None = "sigmoid"  # None: the repository names one that is not known
    problem: str | None = None  # why there is no template, or none for a language-model head


def choose_rerank_prompt(templates: dict[str, Template], tokenizer: Tokenizer, settings: ApiSettings) -> RerankPrompt:
    """Chooses the prompt. A template of the repository joins `templates` under the name `repository`, where it is free.

    Args:
        templates: All compiled templates by name.
        tokenizer: The model's tokenizer.
        settings: Names the operator's choice and the model's folder.

    Raises:
        TemplateRefused: `rerank.template` or `rerank.activation` cannot be used.
    """
    given, files, problem = settings.rerank, None, None
    own: ScoreActivation | None = None
    try:
        folder = settings.model_folder
        files = None if folder is None else read_cross_encoder(folder)
        own = files.activation if files else declared_activation(folder) if folder is not None else None
    except UnknownLayout as unknown:
        problem = str(unknown).rstrip(".")
    named = given.template or settings.rerank_preset
    if given.classifier_from_token is not None:
        return _from_tokens(given.classifier_from_token, templates, tokenizer, settings)
    if named is not None:
        if problem is not None and given.activation is None:
            return RerankPrompt(None, None, "sigmoid", f"{problem}, and `rerank.activation` does not say what applies")
        if named in PRESETS and named not in templates:
            Template(named, PRESETS[named], tokenizer)  # says why it does not suit the tokenizer
        source = CONFIGURATION if given.template else f"preset:{named}"
        chosen = rerank_template(templates, named)
        return _checked(RerankPrompt(chosen, source, _activation(given.activation, own, chosen)))
    if problem is not None:
        return RerankPrompt(None, None, given.activation, problem)
    try:
        found = _from_repository(templates, tokenizer, files)
    except Unwritable as refused:
        return RerankPrompt(None, None, _activation(given.activation, own, None), str(refused).rstrip("."))
    return _checked(found._replace(activation=_activation(given.activation, own, found.template)))


def remedy(
    templates: dict[str, Template], rerank: RerankPrompt, tokenizer: TokenizerProtocol, *, labelled: bool
) -> str:
    """Returns the message of a server that ranks nothing: why, and the lines of configuration that change it.

    Args:
        templates: All compiled templates by name.
        rerank: The prompt, which is none or has no labels.
        tokenizer: The model's tokenizer, which the lines suit.
        labelled: Whether the model has a language-model head, so that the template needs two labels.
    """
    activation = ", activation: sigmoid" if rerank.problem and "rerank.activation" in rerank.problem else ""
    lines = [
        f"`rerank: {{template: {name}{activation}}}` for {what}" for name, what in MODELS.items() if name in templates
    ]
    form = next((form for form in OWN if _suits(form, tokenizer)), None)
    if form is not None:
        own = {"prefix": form.prefix, "suffix": form.suffix} | ({"labels": form.labels} if labelled else {})
        lines.append(
            f"`templates: {{own: {json.dumps(own)}}}` and `rerank: {{template: own{activation}}}`, with the texts that "
            "the model was trained on"
        )
    return (
        f"This server ranks no documents: {rerank.problem or NO_TOKENS}. Add to `args` of its configuration "
        f"{'; or '.join(lines)}."
    )


def _from_tokens(
    tokens: tuple[str, ...], templates: dict[str, Template], tokenizer: Tokenizer, settings: ApiSettings
) -> RerankPrompt:
    """Returns the prompt whose labels are `rerank.classifier_from_token`: no and yes, or the only one.

    Raises:
        TemplateRefused: A token is none of the vocabulary, or there is no prompt.
    """
    given = settings.rerank
    named = given.template or settings.rerank_preset
    if named is None:
        try:
            spec = _pair_spec(tokenizer, None)
        except Unwritable as refused:
            raise TemplateRefused(f"`rerank.template` must be given: {refused}.") from None
        if spec is None:
            raise TemplateRefused(f"`rerank.template` must be given: {NO_PROMPT}.")
    else:
        rerank_template(templates, named)
        spec = settings.templates[named] if named in settings.templates else PRESETS[named]
    spec = replace(spec, labels=tokens[::-1], labels_alone=True, token_ids=(), activation=None)
    template = Template(named or REPOSITORY, spec, tokenizer)
    templates[template.name] = template
    return _checked(RerankPrompt(template, CONFIGURATION, given.activation or "sigmoid"))


def _checked(found: RerankPrompt) -> RerankPrompt:
    """Returns the prompt. Raises TemplateRefused for a softmax over a single number, which would always be 1."""
    if found.activation == "softmax" and found.template is not None and len(found.template.labels) != MAX_LABELS:
        raise TemplateRefused(
            "`rerank.activation` must be none or sigmoid where the score is one number. Given: softmax, with a "
            f"prompt of {len(found.template.labels)} labels."
        )
    return found


def _suits(spec: TemplateSpec, tokenizer: TokenizerProtocol) -> bool:
    try:
        Template("own", spec, tokenizer)
    except TemplateRefused:
        return False
    return True


def _activation(
    chosen: ScoreActivation | None, own: ScoreActivation | None, template: Template | None
) -> ScoreActivation:
    return chosen or own or (template.activation if template else None) or "sigmoid"


def _from_repository(
    templates: dict[str, Template], tokenizer: Tokenizer, files: CrossEncoderFiles | None
) -> RerankPrompt:
    """Returns the prompt that the chat template writes. Raises Unwritable if it cannot be used."""
    spec = _pair_spec(tokenizer, files)
    if spec is None:
        return RerankPrompt(None, None, problem=NO_PROMPT)
    if files is None or not files.token_ids:
        preset = matching_preset(spec)
        if preset in templates:
            return RerankPrompt(templates[preset], f"preset:{preset}")
    token_ids = () if files is None else files.token_ids
    try:
        template = Template(REPOSITORY, _with_files(spec, files, tokenizer), tokenizer)
    except TemplateRefused as refused:
        raise Unwritable(f"the prompt of its chat template cannot be used: {refused}") from None
    templates.setdefault(REPOSITORY, template)
    return RerankPrompt(template, REPOSITORY, problem=None if token_ids else NO_TOKENS)


def _pair_spec(tokenizer: Tokenizer, files: CrossEncoderFiles | None) -> TemplateSpec | None:
    info = tokenizer.info()
    names = {"bos_token": info.bos_token, "eos_token": info.eos_token, "pad_token": info.pad_token}
    values = {"add_generation_prompt": True} if files is None else files.template_values
    renderer = PairRenderer(info.chat_template or "", names, values)
    return pair_spec(renderer, None if files is None else files.structured)


def _with_files(spec: TemplateSpec, files: CrossEncoderFiles | None, tokenizer: Tokenizer) -> TemplateSpec:
    """Returns the texts with the labels and the default instruction that the files name."""
    if files is None:
        return spec
    defaults = dict(spec.defaults)
    if files.instruction:
        if "instruction" not in defaults:
            raise Unwritable("its default prompt is an instruction, which its chat template leaves out")
        defaults["instruction"] = files.instruction
    labels = tuple(tokenizer.token_texts(files.token_ids))
    if not all(labels):
        raise Unwritable(f"LogitScore reads the tokens {files.token_ids}, and the tokenizer has no such one")
    return replace(spec, labels=labels, token_ids=files.token_ids, defaults=defaults)

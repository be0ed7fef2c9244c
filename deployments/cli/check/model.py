"""Checks the model's folder and templates, and derives its memory, without reading weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deployments.api.prompt_formats import compile_chat, decision_prompts
from deployments.api.rerank_prompt import choose_rerank_prompt
from deployments.cli.check.arguments import arguments_of
from deployments.cli.check.findings import Finding, error, under, warning
from deployments.cli.check.memory import ModelMemory
from deployments.config.app_args import AppArgs
from deployments.config.settings import SamplingDefaults
from engine.model.architectures import architectures_of, is_encoder
from engine.model.checkpoint import audit_files, choose_device, faults_allowed, model_length, read_config, weights_dtype
from engine.model.checkpoint_audit import CheckpointAudit
from engine.model.compatibility import UnsupportedModel
from engine.model.file_digests import verify_files
from engine.model.loader import UnsupportedDraft, check_pair
from engine.model.model_folder import BadCheckpoint, ModelNotFound, find_folder
from engine.tokenizer.tokenizer import load_tokenizer
from scoring.prompts.templates import compile_templates


def errors_of(config: dict[str, Any]) -> list[Finding]:
    """Finds the errors of models and prompts that stop a Serve config from starting on this machine."""
    findings = [one for where, args, _ in arguments_of(config) if args is not None for one in check(args, where)[1]]
    return [one for one in findings if one.level == "error"]


def check(args: AppArgs, where: str) -> tuple[ModelMemory | None, list[Finding]]:
    """Checks config.json and the tokenizer of `args` at `where`. Returns no memory for a refused model."""
    place = under(where, "model.path")
    if args.model.path == "toy":
        allowed = (
            [] if faults_allowed() else [error(place, "The toy model is for tests: it needs ASSAY_TEST_FAULTS=1.")]
        )
        return None, allowed
    try:
        folder = find_folder(args.model)
        config = read_config(folder, args.model.max_model_len, args.model.head)
        audit = audit_files(folder, config, args.model)
        verify_files(folder, weights=False)
        longest = model_length(folder, config, args.model)
    except (ModelNotFound, BadCheckpoint, UnsupportedModel) as refused:
        return None, [error(place, str(refused))]
    except (OSError, ValueError) as problem:
        return None, [error(under(where, "model"), str(problem))]
    findings = [*_pair(args, where), *_prompts(args, folder, where)]
    findings += [] if is_encoder(config) else _pool(args, longest, where)
    if not architectures_of(config):
        findings.append(
            warning(place, f"{folder}/config.json names no architecture: it is served as a language model.")
        )
    return _memory(args, config, audit), findings


def _pair(args: AppArgs, where: str) -> Iterator[Finding]:
    if args.speculation.draft is None:
        return
    try:
        check_pair(args.model, args.engine_config())
    except (UnsupportedDraft, ModelNotFound, UnsupportedModel, OSError, ValueError) as refused:
        yield error(under(where, "speculation.draft"), str(refused))


def _prompts(args: AppArgs, folder: Path, where: str) -> Iterator[Finding]:
    """Compiles templates, labels and the chat template as an ingress does when it starts."""
    try:
        tokenizer = load_tokenizer(args.model.tokenizer_path or folder, args.model.revision)
    except (OSError, ValueError) as problem:
        yield error(under(where, "model.tokenizer_path"), f"No tokenizer can be read from it: {_first_line(problem)}")
        return
    try:
        settings = args.api_settings(SamplingDefaults.from_folder(folder), {}, folder)
        chat = compile_chat(tokenizer, settings)
        templates = compile_templates(settings.templates, tokenizer)
        choose_rerank_prompt(templates, tokenizer, settings)
        decision_prompts(tokenizer, settings, chat)
    except ValueError as problem:
        yield error(where, str(problem))


def _pool(args: AppArgs, longest: int, where: str) -> Iterator[Finding]:
    slots = args.engine.kv_slots
    if slots is not None and slots <= longest:
        yield warning(
            under(where, "engine.kv_slots"),
            f"The longest sequence has {longest} tokens and would never fit: raise it over that, or lower "
            f"model.max_model_len. Given: {slots}.",
        )


def _memory(args: AppArgs, config: Any, audit: CheckpointAudit | None) -> ModelMemory:
    text = config.get_text_config(decoder=True)
    layers = 0 if is_encoder(config) else int(text.num_hidden_layers)  # an encoder keeps no keys and values
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    device = _device(args.model.device)
    item = weights_dtype(config, args.model, torch.device(device)).itemsize
    of_token = 2 * layers * heads * width * item
    slots = args.engine.kv_slots
    return ModelMemory(
        weights=None if audit is None else audit.elements * item,
        kv_of_token=of_token,
        kv_pool=None if slots is None else slots * of_token,
        device=device,
    )


def _device(name: str) -> str:
    try:
        return choose_device(name).type
    except ValueError:  # for another machine
        return name


def _first_line(problem: BaseException) -> str:
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__

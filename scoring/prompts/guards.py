"""Presets of guard models: the chat template writes the prompt, and one token of the answer is the judgement.

A guard is recognised by its chat template, which holds the words of its task and the names of its settings. So the
prompt is always the repository's own, with its policy and its `chat_template_kwargs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPreset:
    """Describes a guard model."""

    name: str
    evidence: tuple[str, ...]  # strings that its chat template holds
    others: tuple[str, ...] = ()  # strings that those of later versions hold, which answer in another form
    answer: str = ""  # text between the prompt and the judgement
    labels: tuple[str, ...]  # judgements, the unsafe one first


GUARDS: Mapping[str, GuardPreset] = {
    preset.name: preset
    for preset in (
        GuardPreset(
            name="llama_guard_3",
            evidence=("<BEGIN UNSAFE CONTENT CATEGORIES>", "<END CONVERSATION>", "<|start_header_id|>"),
            answer="\n\n",
            labels=("unsafe", "safe"),
        ),
        GuardPreset(
            name="shieldgemma",
            evidence=("You are a policy expert", "<start_of_turn>", "guideline", "violate the above principle"),
            labels=("Yes", "No"),
        ),
        GuardPreset(
            name="granite_guardian",
            evidence=("guardian_config", "<|start_of_role|>"),
            others=("<score>",),
            labels=("Yes", "No"),
        ),
        GuardPreset(
            name="qwen3guard",
            evidence=("<BEGIN UNSAFE CONTENT CATEGORIES>", "<|im_start|>", "Safety: "),
            answer="Safety:",
            labels=(" Unsafe", " Controversial", " Safe"),
        ),
    )
}


def find_guard(chat_template: str | None) -> GuardPreset | None:
    """Returns the guard whose prompt a chat template writes; None for any other template."""
    source = chat_template or ""
    return next(
        (
            one
            for one in GUARDS.values()
            if all(text in source for text in one.evidence) and not any(text in source for text in one.others)
        ),
        None,
    )

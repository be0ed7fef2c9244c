"""Renders chat messages as the text that a model was trained on, and keeps its control tokens separate from data.

A template writes special tokens ("<|end|>") as text, and a user may write the same text. They are separated at the
source: when the template is compiled, every special string among its own literals is replaced by a secret random mark,
so a special string without a mark is data. Some templates put a special string together from pieces
('<|' + role + '|>'). They are recognised at start-up by rendering harmless messages. Data that holds one of those
strings is broken by another mark before rendering. The same is done for markers such as "<think>", which many
vocabularies do not call special and templates look for in an assistant's message: only there may data hold them. No
mark is ever part of a result.
"""

import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes

from scoring.errors import ScoreCode, ScoringError, refusal
from scoring.prompts.sandbox import FAILURES, TemplateRaised, environment
from scoring.tokenizer_protocol import TokenizerProtocol

Message = Mapping[str, object]
Messages = Sequence[Message]

PROBE = "Ab3 xyz."  # a message's text that no template has reason to treat specially
MARK_SLACK = 8  # marks are longer than what they stand for: the bound while rendering is so many times the real one


class RenderedPart(NamedTuple):
    """Holds a run of rendered text. `control`: it is the special token of this text, not its characters."""

    text: str
    control: bool


def encode_parts(
    tokenizer: TokenizerProtocol,
    parts: Sequence[RenderedPart],
    *,
    add_special_tokens: bool = False,
    max_tokens: int | None = None,
) -> list[int]:
    """Encodes one rendered text. Adjacent text parts are tokenised as one run.

    Args:
        tokenizer: Encodes the text.
        parts: The rendered text.
        add_special_tokens: Add the tokenizer's own special tokens; a second begin token is left out.
        max_tokens: The tokenizer raises its own error beyond so many.

    Returns:
        The token ids.
    """
    text = "".join(tokenizer.mark(part.text) if part.control else part.text for part in parts)
    [ids] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens, plain=True, max_tokens=max_tokens)
    twice = add_special_tokens and tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if twice else ids


class ChatTemplate:
    """Renders messages by a compiled template. Thread-safe; rendering is CPU work for a thread, not an event loop."""

    def __init__(
        self,
        source: str,
        *,
        controls: Collection[str] = (),
        markers: Collection[str] = (),
        names: Mapping[str, str | None] | None = None,
        max_chars: int = 2_000_000,
        max_seconds: float = 2.0,
    ) -> None:
        """Compiles the template and renders harmless messages to learn how it treats roles and special strings.

        Args:
            source: The Jinja template.
            controls: Texts of the special tokens.
            markers: Texts of other added tokens that are not plain text.
            names: Variables for special tokens (`bos_token`, ...).
            max_chars: Characters that one rendering may have.
            max_seconds: Seconds that one rendering may take.

        Raises:
            ValueError: The source is not a template, or does not write a user's message.
        """
        key = secrets.token_hex(16)
        self._controls = sorted(filter(None, controls), key=len, reverse=True)
        self._control = _any_of(self._controls)
        self._marks = {text: f"<{key}:{index}>" for index, text in enumerate(self._controls)}
        self._mark = re.compile(f"<{key}:([0-9]+)>")
        self._end = f"<{key}/>"
        self._break = f"<{key}|>"
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._literals: frozenset[str] = frozenset()
        self._names = {name: text and self._marked(text) for name, text in (names or {}).items()}
        self._composed: re.Pattern[str] = _any_of(())
        self._markers = sorted(filter(None, markers), key=len, reverse=True)
        self._loose = _any_of(self._markers)  # strings that stand for tokens without a mark
        self.variables: frozenset[str] = frozenset()
        """Names that the template mentions and that a request may set."""
        self._template = self._compile(source)
        self._knows_developer = True
        self._left_out: set[str] = set()  # roles whose messages the template passes over in silence
        self._as_parts = False  # it reads a message's text as a list of text parts alone
        self._probe()

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the text that a reader sees. Arguments and errors are those of `parts`.

        For token ids use `parts`: this text does not distinguish a control token from data that spells one.
        """
        found = self.parts(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            values=values,
        )
        return "".join(part.text for part in found)

    def parts(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> list[RenderedPart]:
        """Renders control tokens and the text between them, which is tokenised as plain characters.

        Args:
            messages: At least one message; `role` and `content` of each are strings.
            add_generation_prompt: Open the assistant's turn at the end.
            continue_final_message: End where the last message's text ends, so that the answer continues it.
            values: More variables of the template, of any JSON type.

        Raises:
            ScoringError: The template refuses the messages, or renders too much or too slowly. It names `messages`.
        """
        if not messages:
            raise refusal("messages", "hold at least one. Given: none.")
        data = [self._data(message) for message in messages]
        if continue_final_message:
            data[-1]["content"] = f"{data[-1]['content']}{self._end}"
        text = self._run(data, add_generation_prompt, self._broken(dict(values or {}), self._loose))
        if continue_final_message:
            text, end, _ = text.rpartition(self._end)
            if not end:
                message = "`continue_final_message` needs a template that ends with the last message's text."
                raise ScoringError(ScoreCode.INVALID_VALUE, message, "messages")
            text = text.replace(self._end, "")
        found = list(self._split(text))
        size = sum(len(part.text) for part in found)
        if size > self._max_chars:
            raise _too_large(self._max_chars, size)
        return found

    def _compile(self, source: str) -> Template:
        jinja = environment()
        try:
            tree = jinja.parse(source)
            own = {"messages", "add_generation_prompt", "tools", "documents", *self._names, *jinja.globals}
            self.variables = frozenset(meta.find_undeclared_variables(tree)) - own
            literals = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
            self._literals = frozenset(literals)
            for node in tree.find_all((nodes.TemplateData, nodes.Const)):
                if isinstance(node, nodes.TemplateData):
                    node.data = self._marked(node.data)
                elif isinstance(node, nodes.Const) and isinstance(node.value, str):
                    node.value = self._marked(node.value)
            return jinja.from_string(tree)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"The chat template must be a Jinja template: {error.message} (line {error.lineno})."
            ) from error
        except TemplateError as error:
            raise ValueError("The chat template is no Jinja template.") from error

    def _probe(self) -> None:
        """Renders harmless messages to find the special strings that the template composes and the roles it knows."""
        user, answer = ({"role": role, "content": PROBE} for role in ("user", "assistant"))
        others = ("system", "developer", "tool", "context")
        system, developer, tool, context = ({"role": role, "content": f"{PROBE}!"} for role in others)
        cases = ([user], [user, answer, user], [system, user, answer, user])
        texts = [self._tried(case) for case in cases]
        if not _any_writes(texts):
            self._as_parts = True  # as those of Llama-Guard-3-1B and of models that see images do
            texts = [self._tried(case) for case in cases]
            if not _any_writes(texts):
                raise ValueError("The chat template must write the text of a user's message.")
        by_role = {
            "system": self._tried([system, user]),
            "tool": self._tried([user, answer, tool]),
            "context": self._tried([user, context]),
        }
        as_developer = self._tried([developer, user])
        known = [text for text in (*texts, *by_role.values(), as_developer) if text is not None]
        bare = "".join(self._mark.sub("", text) for text in known)
        composed = [text for text in self._controls if text in bare]
        self._composed = _any_of(composed)
        self._loose = _any_of(sorted([*composed, *self._markers], key=len, reverse=True))
        written, controls = self._likeness(as_developer)
        self._knows_developer = written and (written, controls) >= self._likeness(by_role["system"])
        self._left_out = {role for role, text in by_role.items() if text is not None and f"{PROBE}!" not in text}

    def _likeness(self, text: str | None) -> tuple[bool, int]:
        """Returns whether a probe's second text was written, and among how many control tokens."""
        found = [] if text is None else list(self._split(text))
        return any(f"{PROBE}!" in part.text for part in found), sum(part.control for part in found)

    def _tried(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        try:
            return self._run([dict(message) for message in messages], True, {})
        except ScoringError:
            return None

    def _marked(self, text: str) -> str:
        return self._control.sub(lambda found: self._marks[found[0]], text)

    def _data(self, message: Message) -> dict[str, object]:
        """Returns a message for the template. `developer` becomes `system` where the template does not know it."""

        taken = self._composed if message.get("role") == "assistant" else self._loose
        data: dict[str, object] = self._broken(dict(message), taken)
        if data.get("role") == "developer" and not self._knows_developer:
            data["role"] = "system"
        if data.get("role") in self._left_out:
            raise refusal("messages", f"be without the role {data['role']}, which the chat template leaves out.")
        return data

    def _broken(self, value: Any, taken: re.Pattern[str]) -> Any:
        """Returns data of any JSON type in which no string spells what `taken` matches."""
        match value:
            case str():
                return taken.sub(lambda found: found[0][:1] + self._break + found[0][1:], value)
            case list():
                return [self._broken(one, taken) for one in value]
            case dict():
                return {name: self._broken(one, taken) for name, one in value.items()}
        return value

    def _run(self, messages: list[dict[str, object]], add_generation_prompt: bool, values: Mapping[str, Any]) -> str:
        """Renders text with its marks. The limits are checked after each piece that the template writes."""
        if self._as_parts:
            messages = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in messages]
        given = {
            **values,
            **self._names,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        deadline = time.monotonic() + self._max_seconds
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(given):
                pieces.append(piece)
                size += len(piece)
                if size > MARK_SLACK * self._max_chars:
                    raise _too_large(self._max_chars, size)
                if time.monotonic() > deadline:
                    rule = f"be written by the chat template within {self._max_seconds:g} s. Given: longer."
                    raise refusal("messages", f"{rule} Send fewer of them.", ScoreCode.REQUEST_TOO_LARGE)
        except ScoringError:
            raise
        except TemplateRaised as refused:
            raise self._refused(refused) from refused
        except FAILURES as error:
            raise refusal("messages", "be such as the model's chat template can write. Given: others.") from error
        return "".join(pieces)

    def _refused(self, refused: TemplateRaised) -> ScoringError:
        """Shows the template's message only if it is a literal of the template: others may hold what a client sent."""
        if refused.words in self._literals:
            return refusal("messages", f"suit the model's chat template, which says: {refused.words}")
        return refusal("messages", "suit the model's chat template. Given: messages that it refuses.")

    def _split(self, text: str) -> Iterator[RenderedPart]:
        at = 0
        for mark in self._mark.finditer(text):
            yield from self._plain(text[at : mark.start()])
            yield RenderedPart(self._controls[int(mark[1])], True)
            at = mark.end()
        yield from self._plain(text[at:])

    def _plain(self, text: str) -> Iterator[RenderedPart]:
        at = 0
        for found in self._loose.finditer(text):
            if found.start() > at:
                yield RenderedPart(text[at : found.start()].replace(self._break, ""), False)
            yield RenderedPart(found[0], True)
            at = found.end()
        if at < len(text):
            yield RenderedPart(text[at:].replace(self._break, ""), False)


def _any_writes(texts: Sequence[str | None]) -> bool:
    """Returns whether a rendered text holds the text of the probe's user."""
    return any(text is not None and PROBE in text.replace(f"{PROBE}!", "") for text in texts)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the texts, earlier ones first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")


def _too_large(maximum: int, given: int) -> ScoringError:
    rule = f"be at most {maximum} characters as the chat template writes them. Given: {given} or more."
    return refusal("messages", rule, ScoreCode.REQUEST_TOO_LARGE)

"""Generates the catalogue language: documents, queries and questions, as text with slots and as plain strings.

A `Form` is one text with every wording fixed and every word that varies left as a slot; `Slots` fills it. The strings
made here train the tokenizer and judge the model; `corpus` fills the same forms as token ids on the device, where
training needs a hundred thousand tokens a step.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tools.builtin_model.catalogue import (
    CLASSES,
    CODES,
    DOCUMENTS,
    NAMES,
    WORDS,
    Chance,
    draw_document,
    held_out,
    other_word,
)

OPENERS: Final = ("looking for", "I need", "find", "show me", "do you have", "please send", "where is")
SYSTEMS: Final = (
    "You answer questions about a catalogue.",
    "You are a helpful assistant.",
    "Answer with one word.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Describes a question about document 0: yes or no about classes `used`, or which of `options` words of `asked`."""

    used: tuple[str, ...] = ()
    asked: str = ""
    options: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Holds a text with slots: `{d0.colour}` is the colour of document 0, `{q1.city}` the city that ask 1 names, `{y1}`
    its yes or no, `{o2.0}` the first option of ask 2, `{a2}` the code that answers it, `{w0}`..`{w7}` words of a drill,
    `{p0}`.. words probed in it and `{m0}`.. yes or no for each.

    Attributes:
        asks: what ask j is, for each j in the text.
        shared: classes on which all documents of the text agree.
    """

    family: str
    text: str
    asks: tuple[Ask, ...] = ()
    shared: tuple[str, ...] = ()


SLOT: Final = re.compile(r"\{([a-z]\d(?:\.\w+)?)\}")
MAX_DOCUMENTS: Final = 4
MAX_ASKS: Final = 4
DRILL_WORDS: Final = 8
DRILL_PROBES: Final = 6


def document_text(rng: Chance, number: int = 0) -> str:
    """Returns a document sentence with the slots of document `number`."""
    return re.sub(r"\{(\w+)\}", rf"{{d{number}.\1}}", rng.choice(DOCUMENTS))


def _some_classes(rng: Chance) -> tuple[str, ...]:
    count = rng.choices((1, 2, 3, 4, 5), (25, 30, 30, 10, 5))[0]
    return tuple(rng.sample(CLASSES, count))


def _phrase(used: tuple[str, ...], slot: Callable[[str], str]) -> str:
    """Returns the used classes as a noun phrase, such as `a sturdy red wood chair from Lisbon for reading`."""
    kind = [slot(name) for name in ("adjective", "colour", "material", "object") if name in used]
    head = " ".join(["a", *kind]) if "object" in used else " ".join(["something", *kind])
    tail = [f"{word} {slot(name)}" for name, word in (("city", "from"), ("use", "for")) if name in used]
    return " ".join([head, *tail])


def query_text(rng: Chance, prefix: str, *, opened: bool = True) -> tuple[str, tuple[str, ...]]:
    """Returns a query whose slots are `{prefix.class}`, and its classes; `opened` allows "looking for" and such."""
    used = _some_classes(rng)

    def slot(name: str) -> str:
        return f"{{{prefix}.{name}}}"

    style = rng.randrange(5 if opened else 3)
    if style == 0:
        return " ".join(map(slot, used)), used
    if style == 1:
        return ", ".join(map(slot, used)), used
    if style == 2:
        return _phrase(used, slot), used
    words = " and ".join(map(slot, used)) if style == 3 else _phrase(used, slot)
    return f"{rng.choice(OPENERS)} {words}", used


def predicate_text(rng: Chance, number: int) -> tuple[str, Ask]:
    """Returns a yes/no question about document 0 as ask `number`."""
    query, used = query_text(rng, f"q{number}", opened=False)
    opening = rng.choice(("does it match", "is it about") if query.startswith("{") else ("is it", "is this"))
    return f"Question: {opening} {query}?", Ask(used=used)


def choice_text(rng: Chance, number: int, mark: str | None = None) -> tuple[str, Ask]:
    """Returns a question with coded options, one a line, as ask `number`."""
    asked = rng.choice(CLASSES)
    name = NAMES[asked]
    options = rng.randint(2, len(CODES))
    wording = rng.choice(
        (f"which {name}?", f"which {name} is it?", f"what is the {name}?", f"what {name} does it have?")
    )
    mark = mark or rng.choices((")", ".", ":"), (80, 10, 10))[0]
    lines = "".join(f"\n{CODES[k]}{mark} {{o{number}.{k}}}" for k in range(options))
    return f"Question: {wording}{lines}", Ask(asked=asked, options=options)


def relevance(rng: Chance) -> Form:
    """Returns the default template of the service."""
    query, used = query_text(rng, "q0")
    text = f"Query: {query}\nDocument: {document_text(rng)}\nRelevant: {{y0}}<eos>"
    return Form(family="relevance", text=text, asks=(Ask(used=used),))


def document_first(rng: Chance) -> Form:
    """Returns a document and several queries, each judged."""
    parts, asks = [f"Document: {document_text(rng)}"], []
    for number in range(rng.randint(1, MAX_ASKS)):
        query, used = query_text(rng, f"q{number}")
        parts.append(f"Query: {query}\nRelevant: {{y{number}}}")
        asks.append(Ask(used=used))
    return Form(family="document_first", text="\n".join(parts) + "<eos>", asks=tuple(asks))


def choice(rng: Chance) -> Form:
    """Returns one question with coded options about one document."""
    question, ask = choice_text(rng, 0, ")")
    text = f"Document: {document_text(rng)}\n{question}\nAnswer: {{a0}}<eos>"
    return Form(family="choice", text=text, asks=(ask,))


def _question(rng: Chance, number: int) -> tuple[str, str, Ask]:
    """Returns a question, the slot of its answer, and the ask."""
    if rng.random() < 0.65:
        text, ask = choice_text(rng, number)
        return text, f"{{a{number}}}", ask
    text, ask = predicate_text(rng, number)
    return text, f"{{y{number}}}", ask


def questions(rng: Chance) -> Form:
    """Returns several questions of both kinds about one document."""
    parts, asks = [f"Document: {document_text(rng)}"], []
    for number in range(rng.randint(1, 3)):
        text, slot, ask = _question(rng, number)
        parts.append(f"{text}\nAnswer: {slot}")
        asks.append(ask)
    return Form(family="questions", text="\n".join(parts) + "<eos>", asks=tuple(asks))


def running_text(rng: Chance) -> Form:
    """Returns documents one after another, for completions to continue."""
    shared = (rng.choice(CLASSES),) if rng.random() < 0.5 else ()
    lines = [document_text(rng, number) for number in range(rng.randint(1, MAX_DOCUMENTS))]
    return Form(family="running_text", text="\n".join(lines) + "<eos>", shared=shared)


def _listed(rng: Chance) -> tuple[str, str, tuple[str, ...]]:
    """Returns a query, the documents that match it as lines, and the classes they share."""
    query, used = query_text(rng, "d0")
    lines = [f"- {document_text(rng, number)}" for number in range(rng.randint(1, MAX_DOCUMENTS - 1))]
    return query, "\n".join(lines), used


def listing(rng: Chance) -> Form:
    """Returns a query and documents that match it."""
    query, lines, used = _listed(rng)
    return Form(family="listing", text=f"Query: {query}\nDocuments:\n{lines}<eos>", shared=used)


def _turn(user: str, assistant: str) -> str:
    return f"<|user|>{user}<|end|><|assistant|>{assistant}<|end|>"


def chat(rng: Chance) -> Form:
    """Returns the same requests as chat turns."""
    system = f"<|system|>{rng.choice(SYSTEMS)}<|end|>" if rng.random() < 0.3 else ""
    if rng.random() < 0.2:
        query, lines, used = _listed(rng)
        opening = rng.choice(("List documents for:", "Query:", "Which documents match"))
        return Form(family="chat", text=f"{system}{_turn(f'{opening} {query}', lines)}<eos>", shared=used)
    if rng.random() < 0.4:
        query, used = query_text(rng, "q0")
        ending = rng.choice(("\nRelevant?", "\nIs it relevant?", "\nRelevant:"))
        user = f"Query: {query}\nDocument: {document_text(rng)}{ending}"
        return Form(family="chat", text=f"{system}{_turn(user, '{y0}')}<eos>", asks=(Ask(used=used),))
    turns, asks = [], []
    for number in range(rng.randint(1, 3)):
        text, slot, ask = _question(rng, number)
        opening = f"Document: {document_text(rng)}\n" if number == 0 else ""
        ending = rng.choice(("", "", "\nAnswer:", "\nAnswer with one code." if ask.options else "\nAnswer yes or no."))
        turns.append(_turn(f"{opening}{text}{ending}", slot))
        asks.append(ask)
    return Form(family="chat", text=f"{system}{''.join(turns)}<eos>", asks=tuple(asks))


def drill(rng: Chance) -> Form:
    """Returns drills of membership and copying, which relevance and listing build on, with a label every few tokens.

    Half of the mix at first: without it yes/no stays a coin toss for a long time.
    """
    words = " ".join(f"{{w{k}}}" for k in range(DRILL_WORDS))
    if rng.random() < 0.3:
        return Form(family="drill", text=f"Copy: {words}\nCopy: {words}<eos>")
    comma = rng.choice((" ", ", "))
    probes = "".join(f"\nIs it {{p{k}}}? {{m{k}}}" for k in range(DRILL_PROBES))
    return Form(family="drill", text=f"Words: {words.replace(' ', comma)}{probes}<eos>")


FAMILIES: Final[Mapping[str, Callable[[Chance], Form]]] = {
    make.__name__: make for make in (relevance, document_first, choice, questions, running_text, listing, chat, drill)
}


def _fill_ask(rng: Chance, number: int, ask: Ask, words: Mapping[str, str], hard: float) -> dict[str, str]:
    if ask.asked:
        right = words[ask.asked]
        place = rng.randrange(ask.options)
        options = rng.sample([other for other in WORDS[ask.asked] if other != right], ask.options)
        options[place] = right
        return {f"o{number}.{k}": word for k, word in enumerate(options)} | {f"a{number}": CODES[place]}
    named = {name: words[name] for name in ask.used}
    relevant = rng.random() < 0.5
    if not relevant:
        one = rng.choice(ask.used)
        easy = rng.random() >= hard
        for name in ask.used:
            if name == one or (easy and rng.random() < 0.6):
                named[name] = other_word(rng, name, named[name])
    return {f"q{number}.{name}": word for name, word in named.items()} | {f"y{number}": "yes" if relevant else "no"}


def _fill_drill(rng: Chance) -> dict[str, str]:
    drawn = rng.sample([word for words in WORDS.values() for word in words], DRILL_WORDS + DRILL_PROBES)
    slots = {f"w{k}": drawn[k] for k in range(DRILL_WORDS)}
    for k in range(DRILL_PROBES):
        inside = rng.random() < 0.5
        slots[f"p{k}"] = rng.choice(drawn[:DRILL_WORDS]) if inside else drawn[DRILL_WORDS + k]
        slots[f"m{k}"] = "yes" if inside else "no"
    return slots


def draw_slots(form: Form, rng: Chance, *, kept: bool = False, hard: float = 0.5) -> dict[str, str]:
    """Draws words for every slot of `form`.

    Args:
        kept: documents come from the held-out part, else from the training part.
        hard: of the queries that do not match, the share that is wrong in exactly one word.
    """
    slots = _fill_drill(rng) if form.family == "drill" else {}
    first: dict[str, str] = {}
    for number in range(MAX_DOCUMENTS):
        while True:
            words = draw_document(rng) | {name: first[name] for name in form.shared if first}
            if held_out(words) == kept or (kept and first):  # listed beside a held-out one: any will do
                break
        first = first or words
        slots |= {f"d{number}.{name}": word for name, word in words.items()}
    for number, ask in enumerate(form.asks):
        slots |= _fill_ask(rng, number, ask, first, hard)
    return slots


def render(form: Form, slots: Mapping[str, str]) -> str:
    """Returns the text of `form` with its slots filled."""
    return SLOT.sub(lambda match: slots[match[1]], form.text)


def examples(seed: int, family: str | None = None, *, kept: bool = False, hard: float = 0.5) -> Iterator[str]:
    """Yields strings without end, of one family or of all in turn; equal arguments give equal strings."""
    rng = random.Random(seed)
    makers = [FAMILIES[family]] if family else list(FAMILIES.values())
    while True:
        for make in makers:
            form = make(rng)
            yield render(form, draw_slots(form, rng, kept=kept, hard=hard))

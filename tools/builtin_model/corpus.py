"""Makes training batches of the catalogue language as token ids, filled in on the device.

Every form of `grammar` becomes one row of a table: a literal id, or -1 - s where slot s goes. A batch is a gather of
rows and a gather of slots, so a hundred thousand tokens cost a few dozen small kernels and no string.

Axes: B rows, L token positions, S slots, C classes (6), D documents, A asks, N words of the largest class.
"""

import random
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from tokenizers import Tokenizer

from tools.builtin_model import grammar, vocabulary
from tools.builtin_model.catalogue import CLASSES, CODES, HELD_OUT_MODULUS, WORDS, Chance, word_hash
from tools.builtin_model.grammar import DRILL_PROBES, DRILL_WORDS, MAX_ASKS, MAX_DOCUMENTS, Form

ROW_TOKENS: Final = 96
LABEL_WEIGHT: Final = 8.0
_LABELS: Final = [*(f"y{j}" for j in range(MAX_ASKS)), *(f"a{j}" for j in range(MAX_ASKS))]
SLOT_NAMES: Final = (
    *(f"d{i}.{name}" for i in range(MAX_DOCUMENTS) for name in CLASSES),
    *(f"q{j}.{name}" for j in range(MAX_ASKS) for name in CLASSES),
    *(f"o{j}.{k}" for j in range(MAX_ASKS) for k in range(len(CODES))),
    *(f"w{k}" for k in range(DRILL_WORDS)),
    *(f"p{k}" for k in range(DRILL_PROBES)),
    *(f"m{k}" for k in range(DRILL_PROBES)),
    *_LABELS,
    *(f"{name}-" for name in _LABELS),  # the same labels without a space before
)
_SLOT_INDEX: Final = {name: index for index, name in enumerate(SLOT_NAMES)}


class Row(NamedTuple):
    """Holds a compiled form: ids and slot codes, and the places of its labels."""

    codes: list[int]
    labels: list[int]


class Examples(NamedTuple):
    """Holds a batch on the device."""

    ids_BL: torch.Tensor  # int64, padded with PAD_ID
    weights_BL: torch.Tensor  # float32, loss weight of predicting ids_BL[b, l]; 0 for padding and the first token
    slots_BS: torch.Tensor  # int64 token ids that fill the slots


def compile_form(tokenizer: Tokenizer, form: Form, pieces: dict[str, list[int]] | None = None) -> Row:
    """Compiles a form to the ids of its literal text, with a code -1 - s at each slot and the space before it.

    Literal pieces are encoded on their own (and remembered in `pieces`): slots are whole words, so pieces end where the
    pre-tokenizer splits anyway.
    """
    pieces = {} if pieces is None else pieces
    row, at = Row([], []), 0

    def literal(text: str) -> None:
        if text not in pieces:
            pieces[text] = tokenizer.encode(text, add_special_tokens=False).ids
        row.codes.extend(pieces[text])

    for match in grammar.SLOT.finditer(form.text):
        before, name = form.text[at : match.start()], match[1]
        spaced = before.endswith(" ")
        if not spaced and f"{name}-" not in _SLOT_INDEX:
            raise ValueError(f"expected a space before slot `{name}`. Given: {form.text!r}.")
        literal(before[:-1] if spaced else before)
        if name[0] in "yam":
            row.labels.append(len(row.codes))
        row.codes.append(-1 - _SLOT_INDEX[name if spaced else f"{name}-"])
        at = match.end()
    literal(form.text[at:])
    return row


class Corpus:
    """Compiles many forms of each family, and draws the words that fill them.

    Args:
        forms_a_family: wordings drawn for each family; forms longer than ROW_TOKENS are drawn again.
        seed: of the wordings.
        families: makes a form, by the family's name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        forms_a_family: int,
        seed: int,
        device: torch.device,
        families: Mapping[str, Callable[[Chance], Form]] = grammar.FAMILIES,
    ) -> None:
        self.device = device
        self.families = tuple(families)
        self.forms_a_family = forms_a_family
        self.forms = [form for form, _ in self._compiled(tokenizer, seed, families)]
        self._words(tokenizer)

    def _compiled(
        self, tokenizer: Tokenizer, seed: int, families: Mapping[str, Callable[[Chance], Form]]
    ) -> list[tuple[Form, Row]]:
        rng, pieces = random.Random(seed), dict[str, list[int]]()
        compiled: list[tuple[Form, Row]] = []
        for make in families.values():
            wanted = len(compiled) + self.forms_a_family
            while len(compiled) < wanted:
                form = make(rng)
                row = compile_form(tokenizer, form, pieces)
                if len(row.codes) <= ROW_TOKENS:
                    compiled.append((form, row))
        count = len(compiled)
        codes = torch.full((count, ROW_TOKENS), vocabulary.PAD_ID)
        weights = torch.zeros(count, ROW_TOKENS)
        self.shared_FC = torch.zeros(count, len(CLASSES), dtype=torch.bool)
        self.used_FAC = torch.zeros(count, MAX_ASKS, len(CLASSES), dtype=torch.bool)
        self.asked_FA = torch.zeros(count, MAX_ASKS, dtype=torch.int64)
        self.options_FA = torch.full((count, MAX_ASKS), 2)
        for index, (form, row) in enumerate(compiled):
            codes[index, : len(row.codes)] = torch.tensor(row.codes)
            weights[index, 1 : len(row.codes)] = 1.0
            weights[index, row.labels] = LABEL_WEIGHT
            self._describe(index, form)
        self.codes_FL, self.weights_FL = codes.to(self.device), weights.to(self.device)
        for name in ("shared_FC", "used_FAC", "asked_FA", "options_FA"):
            setattr(self, name, getattr(self, name).to(self.device))
        return compiled

    def _describe(self, index: int, form: Form) -> None:
        for name in form.shared:
            self.shared_FC[index, CLASSES.index(name)] = True
        for number, ask in enumerate(form.asks):
            for name in ask.used:
                self.used_FAC[index, number, CLASSES.index(name)] = True
            if ask.asked:
                self.asked_FA[index, number] = CLASSES.index(ask.asked)
                self.options_FA[index, number] = ask.options

    def _words(self, tokenizer: Tokenizer) -> None:
        """Sets token ids and split hashes of the words, by class and index; every word must be one token."""

        def token(text: str) -> int:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) != 1:
                raise ValueError(f"{text!r} must be one token. Given: {len(ids)}.")
            return int(ids[0])

        sizes = [len(words) for words in WORDS.values()]
        ids = torch.full((len(CLASSES), max(sizes)), -1)
        hashes = torch.zeros(len(CLASSES), max(sizes), dtype=torch.int64)
        for c, words in enumerate(WORDS.values()):
            ids[c, : len(words)] = torch.tensor([token(f" {word}") for word in words])
            hashes[c, : len(words)] = torch.tensor([word_hash(word) for word in words])
        self.sizes_C = torch.tensor(sizes, device=self.device)
        self.word_ids_CN, self.hashes_CN = ids.to(self.device), hashes.to(self.device)
        self.all_words_W = ids[ids >= 0].to(self.device)
        self.answers = {
            space: (
                torch.tensor([token(f"{space}no"), token(f"{space}yes")], device=self.device),
                torch.tensor([token(f"{space}{code}") for code in CODES], device=self.device),
            )
            for space in ("", " ")
        }

    def pick(self, rows: int, shares: Mapping[str, float], generator: torch.Generator) -> torch.Tensor:
        """Draws a form for each row, int64 [B], families in proportion to `shares`."""
        weights = torch.tensor(
            [shares.get(name, 0.0) for name in self.families], dtype=torch.float32, device=self.device
        )
        family = torch.multinomial(weights, rows, replacement=True, generator=generator)
        form = torch.randint(self.forms_a_family, (rows,), device=self.device, generator=generator)
        return family * self.forms_a_family + form

    def fill(self, forms_B: torch.Tensor, generator: torch.Generator, *, hard: float = 0.5) -> Examples:
        """Draws rows of the training part. Four draws leave few documents of the other; their rows weigh nothing."""
        documents_BDC = self._documents(forms_B, generator)
        for _ in range(3):
            held_B = self._held(documents_BDC).any(1)
            documents_BDC = torch.where(held_B[:, None, None], self._documents(forms_B, generator), documents_BDC)
        kept_B = ~self._held(documents_BDC).any(1)
        examples = self._fill(forms_B, documents_BDC, generator, hard)
        return examples._replace(weights_BL=examples.weights_BL * kept_B[:, None])

    def fill_held_out(self, forms_B: torch.Tensor, generator: torch.Generator, *, hard: float = 1.0) -> Examples:
        """Draws rows whose first document is held out: about 1 in 31 of `forms_B`."""
        documents_BDC = self._documents(forms_B, generator)
        held_B = self._held(documents_BDC)[:, 0]
        return self._fill(forms_B[held_B], documents_BDC[held_B], generator, hard)

    def _rand(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=self.device, generator=generator)

    def _held(self, documents_BDC: torch.Tensor) -> torch.Tensor:
        classes = torch.arange(len(CLASSES), device=self.device)
        hashed_BD: torch.Tensor = self.hashes_CN[classes, documents_BDC].sum(-1) % HELD_OUT_MODULUS
        return hashed_BD == 0

    def _documents(self, forms_B: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        drawn = self._rand(generator, len(forms_B), MAX_DOCUMENTS, len(CLASSES))
        documents_BDC = (drawn * self.sizes_C).long()
        return torch.where(self.shared_FC[forms_B][:, None], documents_BDC[:, :1], documents_BDC)

    def _queries(
        self, forms_B: torch.Tensor, first_BC: torch.Tensor, generator: torch.Generator, hard: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws the word indices [B, A, C] of the queries, and whether each is true [B, A]."""
        used = self.used_FAC[forms_B]
        relevant = self._rand(generator, *used.shape[:2]) < 0.5
        easy = self._rand(generator, *used.shape[:2], 1) >= hard
        one = (self._rand(generator, *used.shape) + used).argmax(-1, keepdim=True)  # a used class, where there is one
        changed = (self._rand(generator, *used.shape) < 0.6) & easy
        changed = (changed | (torch.arange(len(CLASSES), device=self.device) == one)) & ~relevant[..., None]
        step = 1 + (self._rand(generator, *used.shape) * (self.sizes_C - 1)).long()
        queries = torch.where(changed, (first_BC[:, None] + step) % self.sizes_C, first_BC[:, None])
        return queries, relevant

    def _options(
        self, forms_B: torch.Tensor, first_BC: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws the token ids [B, A, 6] of the options, and the right one's index [B, A]."""
        asked = self.asked_FA[forms_B]
        right = first_BC.gather(1, asked)
        order = self._rand(generator, *asked.shape, self.word_ids_CN.shape[1])
        words = torch.arange(order.shape[-1], device=self.device)
        order = order.masked_fill((words >= self.sizes_C[asked][..., None]) | (words == right[..., None]), 2.0)
        options = order.topk(len(CODES), largest=False).indices
        place = (self._rand(generator, *asked.shape) * self.options_FA[forms_B]).long()
        options = options.scatter(2, place[..., None], right[..., None])
        return self.word_ids_CN[asked[..., None], options], place

    def _drill(self, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws token ids [B, 8] of the words and [B, 6] of the probes, and whether a probe is among the words."""
        order = self._rand(generator, rows, len(self.all_words_W)).topk(DRILL_WORDS + DRILL_PROBES).indices
        drawn = self.all_words_W[order]
        words, outside = drawn[:, :DRILL_WORDS], drawn[:, DRILL_WORDS:]
        inside = self._rand(generator, rows, DRILL_PROBES) < 0.5
        chosen = words.gather(1, (self._rand(generator, rows, DRILL_PROBES) * DRILL_WORDS).long())
        return words, torch.where(inside, chosen, outside), inside

    def _fill(
        self, forms_B: torch.Tensor, documents_BDC: torch.Tensor, generator: torch.Generator, hard: float
    ) -> Examples:
        rows, classes = len(forms_B), torch.arange(len(CLASSES), device=self.device)
        queries, relevant = self._queries(forms_B, documents_BDC[:, 0], generator, hard)
        options, place = self._options(forms_B, documents_BDC[:, 0], generator)
        words, probes, inside = self._drill(rows, generator)
        (spaced, spaced_codes), (bare, bare_codes) = self.answers[" "], self.answers[""]
        slots_BS = torch.cat(
            [
                self.word_ids_CN[classes, documents_BDC].flatten(1),
                self.word_ids_CN[classes, queries].flatten(1),
                options.flatten(1),
                words,
                probes,
                spaced[inside.long()],
                spaced[relevant.long()],
                spaced_codes[place],
                bare[relevant.long()],
                bare_codes[place],
            ],
            dim=1,
        )
        codes_BL = self.codes_FL[forms_B]
        filled = slots_BS.gather(1, (-1 - codes_BL).clamp_min(0))
        return Examples(torch.where(codes_BL < 0, filled, codes_BL), self.weights_FL[forms_B], slots_BS)


def pack(examples: Examples, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins each `rows` rows into one without the padding between them: ids and weights [B / rows, rows * L].

    The text after an example then has strangers before it, at positions far beyond a single row.
    """
    ids, weights = (value.view(-1, rows * ROW_TOKENS) for value in (examples.ids_BL, examples.weights_BL))
    order = (ids == vocabulary.PAD_ID).to(torch.uint8).argsort(dim=1, stable=True)
    return ids.gather(1, order), weights.gather(1, order)

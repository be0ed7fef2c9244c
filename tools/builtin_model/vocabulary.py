"""Learns the tokenizer of the built-in model: byte-level BPE of 2,048 ids, learned on the catalogue language.

python -m tools.builtin_model.vocabulary      # rewrites engine/builtin/target/tokenizer.json and tokenizer_config.json
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.builtin_model import grammar
from tools.builtin_model.catalogue import CODES, WORDS

SIZE: Final = 2048
PAD, EOS, SYSTEM, USER, ASSISTANT, END = SPECIALS = (
    "<pad>",
    "<eos>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
PAD_ID, EOS_ID, END_ID = SPECIALS.index(PAD), SPECIALS.index(EOS), SPECIALS.index(END)
FOLDER: Final = Path(__file__).parents[2] / "engine" / "builtin" / "target"
STRINGS_A_FAMILY: Final = 1500

# Everyday words, so that the ids which the catalogue leaves over serve text outside of it.
EVERYDAY: Final = """
    about above across after again against all almost along already also always among and another answer any anyone
    anything around as ask at away back bad be became because become been before began begin behind being believe
    below between big body book both bring brought build but call came can car carry case change child children
    choose city class clear close cold come common complete could country course cut day decide deep did different
    difficult do does done door down draw drive during each early earth easy eat either end enough even evening ever
    every everyone everything example eye face fact fall family far fast father feel few field find fire first five
    follow food force form found four free friend from front full game gave general get girl give given go gone good
    great ground group grow had half hand happen happy hard has have he head hear heart help her here herself high
    him himself his hold home hope hot hour house how however human hundred idea if important in inside instead
    interest into is it its itself job just keep kind king knew know land language last late later laugh law lead
    learn least leave left less let letter level life like line list listen little live local long lost love low
    made main make man many map mark market may maybe me mean measure meet member men might mind minute miss model
    moment money month more morning most mother mountain move much music must my name nation natural near need never
    new next night nine no none nor north not note nothing now number of off often old on once one only open or
    order other our out over own page parent part party pass past pay people perhaps period person picture piece
    place plan play point possible power present problem product program public pull put question quick quite reach
    ready real reason record remember rest result right river road rock room round rule said same sat save saw say
    school science sea second see seem sell send sentence set seven several shall she ship short should show side
    sign since sing sister sit six sky slow so some someone something sometimes song soon sort sound south space
    speak special stand star start state stay step still stop story street student study such sun sure system take
    talk teach tell ten than thank that the their them then there these they thing think third this those though
    thought three through time to today together told too took top toward town train travel tree true try turn two
    under understand until up upon us usual value very visit voice wait walk wall want war was watch water way we
    week well went were west what when where whether which while who whole why will wind window wish with within
    without woman women word work world would write year yes yet you young your
"""

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] in ('system', 'developer') -%}<|system|>"
    "{%- elif message['role'] == 'user' -%}<|user|>"
    "{%- elif message['role'] == 'assistant' -%}<|assistant|>"
    "{%- else -%}{{ raise_exception('The roles are system, developer, user and assistant.') }}"
    "{%- endif -%}"
    "{{- message['content'] -}}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def _corpus() -> Iterator[str]:
    """Yields catalogue strings of every family, its words with and without a space before, and everyday words."""
    for number, family in enumerate(grammar.FAMILIES):
        yield from islice(grammar.examples(number, family), STRINGS_A_FAMILY)
    words = [word for group in WORDS.values() for word in group]
    bare = ["yes", "no", *CODES]
    yield from (f" {word}" for word in [*words, *bare] for _ in range(200))
    yield from (word for word in bare for _ in range(200))
    yield from (f" {word}" for word in EVERYDAY.split() for _ in range(20))
    yield from (form for word in EVERYDAY.split() for form in (word.capitalize(), f" {word.capitalize()}"))


def train() -> Tokenizer:
    """Returns the tokenizer, the same every time: specials first, then the 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != SIZE:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} ids, expected {SIZE}")
    return tokenizer


def save(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    train().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path = FOLDER) -> Tokenizer:
    """Loads the tokenizer in `folder`."""
    loaded: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return loaded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the tokenizer of the built-in model.")
    parser.add_argument("--out", type=Path, default=FOLDER)
    save(parser.parse_args().out)

"""Defines the catalogue: words by class, wordings of documents, and which documents are held out from training."""

import random
import zlib
from collections.abc import Mapping
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# No word but a city or a use begins with a vowel sound, so that "a" is always the right article; no word is in two
# classes or in the wording around it, so a word says its class.
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "adjective": _words(
        "sturdy light heavy cheap modern rustic plain fancy small large tiny huge soft smooth rough shiny bright quiet "
        "strong delicate durable vintage"
    ),
    "colour": _words(
        "red blue green yellow black white brown pink purple grey beige teal cyan crimson scarlet violet maroon navy "
        "magenta turquoise lavender cream khaki tan"
    ),
    "material": _words(
        "wood steel glass cotton leather marble bamboo copper wool silk paper plastic rubber bronze brass silver gold "
        "linen velvet granite clay wax cork felt nylon denim pine teak"
    ),
    "object": _words(
        "chair table lamp desk bench shelf basket bottle bowl plate cup mug knife spoon fork kettle vase mirror clock "
        "box bag tent boat bicycle ladder hammer blanket carpet curtain pillow drum violin guitar piano wheel "
        "bucket"
    ),
    "city": _words(
        "Paris London Berlin Madrid Rome Lisbon Vienna Prague Dublin Oslo Tokyo Kyoto Seoul Beijing Delhi Mumbai Cairo "
        "Lagos Nairobi Sydney Toronto Chicago Boston Denver Lima Quito Havana Athens Warsaw Zurich"
    ),
    "use": _words(
        "reading cooking writing camping fishing sleeping painting dining travel storage gardening hiking sewing "
        "baking cycling sailing swimming dancing hunting drawing cleaning running skiing teaching"
    ),
}
CLASSES: Final = tuple(WORDS)
NAMES: Final[Mapping[str, str]] = {name: name for name in CLASSES} | {"adjective": "style"}  # as questions call them
CODES: Final = tuple("ABCDEF")

DOCUMENTS: Final = (
    "This {adjective} {colour} {object} is made of {material} and comes from {city}, ready for {use}.",
    "From {city}: a {colour} {object} of {adjective} {material}, used for {use}.",
    "A {material} {object} for {use}, {adjective} and {colour}, made in {city}.",
    "The {object} is {colour} and {adjective}. It is {material}, sent from {city} and meant for {use}.",
    "For {use} we offer a {adjective} {material} {object} in {colour}, shipped from {city}.",
    "Our shop in {city} sells a {colour} {material} {object}. It is {adjective} and suits {use}.",
    "Item: {object}. Colour: {colour}. Material: {material}. City: {city}. Use: {use}. Style: {adjective}.",
    "People in {city} like this {adjective} {object} for {use}: {colour} {material} all over.",
    "Look at the {colour} {object}! Its {material} body is {adjective}, and {city} knows it for {use}.",
    "You can buy one {object} in {colour} {material}, {adjective} enough for {use}, at our {city} store.",
    "Made for {use}: the {adjective} {city} {object}, {colour}, pure {material}.",
    "For {use}, take the {material} {object} from {city}; it is {colour} and {adjective}.",
    "Sold in {city}, this {object} has {colour} {material} sides and a {adjective} look. Best for {use}.",
    "What is {adjective}, {colour} and perfect for {use}? The {material} {object} by makers in {city}.",
    "New in the catalogue: {colour} {material} {object}, {adjective}, {city} style, for {use}.",
    "In {colour}, this {object} looks {adjective}. Workers from {city} shape the {material} by hand for {use}.",
)
Chance = random.Random
HELD_OUT_MODULUS: Final = 31


def word_hash(word: str) -> int:
    """Returns a fixed hash of one word in [0, 31), for the split."""
    return zlib.crc32(word.encode()) % HELD_OUT_MODULUS


def held_out(words: Mapping[str, str]) -> bool:
    """Returns whether the document of these six words (class -> word) is held out, in every wording.

    One document in 31 is held out; as training never shows one in any form, no (query, document) pair is in both parts.
    """
    return sum(word_hash(words[name]) for name in CLASSES) % HELD_OUT_MODULUS == 0


def draw_document(rng: Chance, kept: bool | None = None) -> dict[str, str]:
    """Draws six words, class -> word: a held-out document if `kept`, one of the training part if False."""
    while True:
        words = {name: rng.choice(WORDS[name]) for name in CLASSES}
        if kept is None or held_out(words) == kept:
            return words


def other_word(rng: Chance, name: str, word: str) -> str:
    """Draws another word of the class."""
    return rng.choice([other for other in WORDS[name] if other != word])

"""Defines what a verify step takes beside the target's logits: draft tokens, what they were drawn from, and the rule.

Shape legend: B requests, K draft steps, V vocabulary, N = PROPOSAL_IDS.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, get_args

MAX_DRAFTS: Final = 8  # of a run
PROPOSAL_IDS: Final = 64  # ids of a sparse proposal

Rule = Literal["strict", "standard", "block", "synthetic"]
DraftMethod = Literal["greedy", "probabilistic"]
RULES: Final[tuple[Rule, ...]] = get_args(Rule)
DRAFT_METHODS: Final[tuple[DraftMethod, ...]] = get_args(DraftMethod)


class ProposalKind(IntEnum):
    """Says how a request's drafts were made, and so what q is."""

    NONE = 0  # no drafts
    ONE_HOT = 1  # each draft was certain: q = 1 there
    SPARSE = 2  # drawn from `q_probs` over `q_ids`
    DENSE = 3  # drawn from softmax(q_logits / T)


class Proposal(NamedTuple):
    """Holds drafts, numpy arrays or tensors. Each was drawn from its q with noise that verification does not use."""

    draft_ids: Any  # i32 [B, K]; the first negative id ends a run
    kind: Any  # u8 [B], ProposalKind; a row without q is ONE_HOT (a point mass), counted by the caller
    q_ids: Any | None = None  # i32 [B, K, N], each id once, padded with INVALID_TOKEN
    q_probs: Any | None = None  # f32 [B, K, N], sums to 1 over a position
    q_logits: Any | None = None  # [B, K, V] of any float type: the drafter's, which it drew from at the row's T


class Draft(NamedTuple):
    """Holds one draft token a row, and what each was drawn from: a sparse proposal's column."""

    ids: Any  # i32 [B], INVALID_TOKEN where the drafter has none
    q_ids: Any  # i32 [B, N], padded with INVALID_TOKEN
    q_probs: Any  # f32 [B, N]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRules:
    """Says which drafts are accepted. Greedy rows accept the first token of the total order under every rule.

    - `strict`: a draft that is the token which the row itself draws at that position; needs no q;
    - `standard`: with probability min(1, p / q), else a token from max(p - q, 0) (Leviathan, Kalman, Matias 2023;
      Chen et al. 2023);
    - `block`: runs as a whole, at least as many drafts as `standard` (Sun et al. 2024, "Block verification");
    - `synthetic`: at fixed rates, for benchmarks; the output follows no distribution.
    """

    rule: Rule = "standard"
    seeded: Rule = "strict"  # the rule of rows with an explicit seed
    synthetic: tuple[float, ...] = ()  # by position: the rate at which a draft is accepted if all before it were

    def __post_init__(self) -> None:
        for name, rule in (("rule", self.rule), ("seeded", self.seeded)):
            if rule not in RULES:
                raise ValueError(f"`{name}` must be one of {', '.join(RULES)}. Given: {rule}.")
        if not all(0 <= rate <= 1 for rate in self.synthetic):
            raise ValueError(f"`synthetic` must be rates in [0, 1]. Given: {self.synthetic}.")
        if "synthetic" in (self.rule, self.seeded) and not self.synthetic:
            raise ValueError("`synthetic` must give a rate for each position. Given: none.")

    def rate(self, position: int) -> float:
        """Returns the synthetic rule's rate at a position; 0 after the last one given."""
        return self.synthetic[position] if position < len(self.synthetic) else 0.0


DEFAULT_RULES: Final = VerifyRules()


def check_proposal(proposal: Proposal, requests: int, vocab_size: int) -> int:
    """Returns K; ValueError for an array whose shape does not go with `requests` requests."""
    shape = tuple(proposal.draft_ids.shape)
    if len(shape) != 2 or shape[0] != requests or shape[1] > MAX_DRAFTS:
        raise ValueError(f"got draft_ids {shape}, expected ({requests}, K) with K at most {MAX_DRAFTS}")
    sparse, dense = (requests, shape[1], PROPOSAL_IDS), (requests, shape[1], vocab_size)
    expected = {"kind": (requests,), "q_ids": sparse, "q_probs": sparse, "q_logits": dense}
    for name, wanted in expected.items():
        given = getattr(proposal, name)
        if given is not None and tuple(given.shape) != wanted:
            raise ValueError(f"got {name} {tuple(given.shape)}, expected {wanted}")
    if (proposal.q_ids is None) != (proposal.q_probs is None):
        raise ValueError("`q_ids` and `q_probs` must be given together")
    return int(shape[1])

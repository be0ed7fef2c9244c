"""Computes what a request costs, for admission, for the engine's queue and for metering.

The unit is a token to be read. A generated token counts as `Costs.decode_token_cost` of them. Costs are computed as if
nothing were cached.
"""

import numpy as np

from engine.config import Costs
from engine.requests import EngineRequest, GenerateRequest, LikelihoodRequest, PoolingRequest, ScoreRequest


def request_cost(request: EngineRequest, costs: Costs) -> int:
    """Returns the cost of a request whose arrays have the right shapes; their values need not be checked yet."""
    match request:
        case ScoreRequest(prefix=prefix, ids=ids, starts=starts):  # an empty row computes one token
            return len(prefix) + len(ids) + int(np.count_nonzero(starts[1:] == starts[:-1]))
        case PoolingRequest(prefix=prefix, ids=ids):
            return len(prefix) + len(ids)
        case LikelihoodRequest(prefix=prefix, ids=ids, wanted=wanted):  # a row's last token is not computed
            return len(prefix) + len(ids) - len(wanted)
        case GenerateRequest(prompt=prompt, params=params):
            emitted = [len(branch) for branch in request.emitted] or [0] * params.n
            answers = 0 if request.prompt_only else sum(answer_cost(request, count, costs) for count in emitted)
            return len(prompt) + sum(emitted) + answers
    raise TypeError(f"`request` must be a request of engine.requests. Given: a {type(request).__name__}.")


def answer_cost(request: GenerateRequest, emitted: int, costs: Costs) -> int:
    """Returns the expected cost of the tokens that a branch with `emitted` tokens still generates."""
    return int(costs.decode_token_cost * min(request.params.max_tokens - emitted, costs.expected_tokens))

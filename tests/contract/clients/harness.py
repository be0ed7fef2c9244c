"""lm-evaluation-harness as a user runs it. Arguments: url, tasks, folder, and options of the model.

Answers the results, every log-likelihood request as the ids that were sent, and every text that was generated.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager


class Watched(LocalCompletionsAPI):  # type: ignore[misc]
    """Remembers what it asked and what it made of the answers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[dict[str, Any]] = []

    def _loglikelihood_tokens(self, requests: Any, *rest: Any, **options: Any) -> Any:
        found = super()._loglikelihood_tokens(requests, *rest, **options)
        for (_, context, continuation), (logprob, greedy) in zip(requests, found, strict=True):
            self.asked.append(
                {"context": list(context), "continuation": list(continuation), "logprob": logprob, "greedy": greedy}
            )
        return found


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    model = Watched(base_url=f"{arguments['url']}/v1/completions", model="builtin", **arguments["options"])
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=arguments["tasks"],
        task_manager=TaskManager(include_path=arguments["folder"], include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = {
        name: [{"target": one["target"], "resps": one["resps"], "doc": one["doc"]} for one in rows]
        for name, rows in found["samples"].items()
    }
    told = {"results": found["results"], "samples": samples, "asked": model.asked}
    answer.write_text(json.dumps(told, default=str), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

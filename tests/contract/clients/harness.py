"""lm-evaluation-harness as a user runs it. Arguments: url, folder of tasks, runs by name: task, options of the model.

Answers by run the results, every log-likelihood request as the ids that were sent, and every text that was generated.
One process for all runs: importing the harness takes longer than most of them.
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


def evaluated(url: str, tasks: TaskManager, task: str, options: dict[str, Any]) -> dict[str, Any]:
    model = Watched(base_url=f"{url}/v1/completions", model="builtin", **options)
    found = lm_eval.simple_evaluate(model=model, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0)
    samples = [{"doc": one["doc"], "resps": one["resps"]} for one in found["samples"][task]]
    return {"results": found["results"][task], "samples": samples, "asked": model.asked}


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    tasks = TaskManager(include_path=arguments["folder"], include_defaults=False)
    told = {name: evaluated(arguments["url"], tasks, **run) for name, run in arguments["runs"].items()}
    answer.write_text(json.dumps(told, default=str), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

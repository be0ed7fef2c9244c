"""Progress: what a client has of a generation, and the task of what is still missing."""

from dataclasses import replace

import numpy as np

from deployments.messages import Failure, GenerateReply, GenerateTask, PromptChunk, PromptScores, UInt64s
from engine.jobs import GenerateChunk, Int32s

Place = tuple[int, int]  # prompt and branch, in the numbering of the client's task


class Progress:
    """Random numbers depend on seed, branch and position alone, and penalties, bans and stops follow from the tokens:
    prompt and tokens are all that another replica needs to go on exactly. A chunk ends where a run of drafts ends, as
    the speculative rules need it."""

    def __init__(self, task: GenerateTask) -> None:
        self._task = task
        self._branches = task.params.n
        self._tokens = {
            (q, b): bytearray(task.emitted[q][b].tobytes() if task.emitted else b"")
            for q in range(len(task.starts) - 1)
            for b in range(self._branches)
        }
        self._open = set(self._tokens)
        self._unscored = set() if task.prompt_top is None else set(range(len(task.starts) - 1))
        self._cached: dict[int, int] = {}  # by prompt, as the first replica that worked on it found it
        self._asked = list(range(len(task.starts) - 1))  # prompts of the task as it was last sent
        self._sizes: dict[Place, int] = {}  # bytes that a branch had when it was last sent
        self._epoch = task.epoch
        if task.prompt_only:
            self._open = set()

    @property
    def over(self) -> bool:
        return not self._open and not self._unscored

    @property
    def begun(self) -> bool:
        """Whether the client has anything that the task did not come with."""
        return self._epoch > self._task.epoch or bool(self._cached) or self._any_scored()

    def _any_scored(self) -> bool:
        return self._task.prompt_top is not None and len(self._unscored) < len(self._task.starts) - 1

    def take(self, reply: GenerateReply) -> GenerateReply | None:
        """What of the reply is new, in the client's numbering; None if nothing is. Called for every reply."""
        if reply.epoch != self._epoch:
            return None
        chunks = [found for item in reply.chunks if (found := self._chunk(item)) is not None]
        if not chunks and reply.chunks:
            return None
        return reply if self._epoch == self._task.epoch else GenerateReply(tuple(chunks), self._task.epoch, reply.load)

    def _chunk(self, item: PromptChunk) -> PromptChunk | None:
        prompt, chunk = self._asked[item.prompt], item.chunk
        if isinstance(chunk, PromptScores):
            if prompt not in self._unscored:
                return None
            self._unscored.discard(prompt)
        elif not isinstance(chunk, Failure):
            place = (prompt, chunk.branch)
            if place not in self._open:
                return None
            self._tokens[place] += chunk.tokens.tobytes()
            if chunk.finish is not None:
                self._open.discard(place)
            first = self._cached.setdefault(prompt, chunk.cached)
            if self._epoch > self._task.epoch:
                chunk = self._as_if_unbroken(chunk, first)
        return PromptChunk(prompt, chunk)

    @staticmethod
    def _as_if_unbroken(chunk: GenerateChunk, cached: int) -> GenerateChunk:
        """What was generated before is no part of the prompt, wherever the next replica found it."""
        return chunk._replace(cached=cached)

    def rest(self) -> GenerateTask:
        """The task of the prompts and branches that have not ended, an epoch later."""
        task = self._task
        self._epoch += 1
        self._asked = sorted({q for q, _ in self._open} | self._unscored)
        self._sizes = {place: len(self._tokens[place]) for place in self._open}
        parts = [task.prompts[task.starts[q] : task.starts[q + 1]] for q in self._asked]
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum([len(part) for part in parts])))
        seeds: UInt64s = task.seeds[self._asked]
        return replace(
            task,
            prompts=np.concatenate(parts),
            starts=starts.astype(np.int32),
            seeds=seeds,
            emitted=tuple(tuple(self._so_far((q, b)) for b in range(self._branches)) for q in self._asked),
            prompt_top=task.prompt_top if self._unscored else None,
            epoch=self._epoch,
        )

    def _so_far(self, place: Place) -> Int32s:
        return np.frombuffer(bytes(self._tokens[place]), np.int32)

    def advanced(self, tokens: int) -> bool:
        """Whether every branch has ended or has so many more tokens than when the task was last sent."""
        return all(len(self._tokens[place]) - self._sizes.get(place, 0) >= 4 * tokens for place in self._open)

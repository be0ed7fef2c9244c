"""ReplicaServer: one engine, its thread and its health, behind methods that Serve calls from other processes.

Company: the tasks of a convoy at a replica, each answered as if it had come alone.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from deployments.config.app_args import AppArgs
from deployments.health_probe import Canary, CanaryReply
from deployments.observability.exposition import Snapshot
from deployments.observability.replica_metrics import ReplicaMetrics
from deployments.protocol import (
    MOST_IN_CONVOY,
    Convoy,
    Failure,
    GenerateReply,
    GenerateTask,
    LikelihoodReply,
    LikelihoodTask,
    Load,
    ModelCard,
    PromptChunk,
    PromptScores,
    ScoreReply,
    ScoreTask,
)
from deployments.quarantine import Entries, Ward
from deployments.replica.tasks import generate_jobs, likelihood_job, prompt_job, score_job, scoring_job
from deployments.replica.utilization import Usage
from deployments.stream_buffer import Pending
from engine.engine import Engine
from engine.model.interface import CausalLM
from engine.model.loader import load_models
from engine.requests import EngineError, ErrorCode, GenerateRequest, LikelihoodRequest, RowStatus

log = logging.getLogger("ray.serve")
Reply = ScoreReply | LikelihoodReply | Failure


async def answered(
    convoy: Convoy,
    score: Callable[[ScoreTask], Awaitable[ScoreReply | Failure]],
    likelihood: Callable[[LikelihoodTask], Awaitable[LikelihoodReply | Failure]],
    refusals: Callable[[Sequence[ScoreTask | LikelihoodTask]], Sequence[Failure | None]],
    load: Callable[[], Load],
) -> tuple[Reply | None, ...] | Failure:
    """The replies in order; a Failure of all of them for what is no convoy. Where there is no room for one of them none
    is taken, so that no refusal waits until the others are computed: None, in `refusals` too, says who may come again
    without it. All tell the replica's `load` as it is in the end: some have waited for the others since they took
    theirs. Cancelled, it cancels every task."""
    tasks: object = getattr(convoy, "tasks", None)
    if not isinstance(tasks, tuple) or not 1 <= len(tasks) <= MOST_IN_CONVOY or not all(map(_scores, tasks)):
        return Failure(ErrorCode.INVALID_VALUE, f"`tasks` must be 1 to {MOST_IN_CONVOY} scoring tasks.", "tasks")
    refused: Sequence[Reply | None] = refusals(tasks)
    if any(refused):
        return tuple(refused)
    calls: list[Awaitable[Reply]] = [score(task) if isinstance(task, ScoreTask) else likelihood(task) for task in tasks]
    works = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.sleep(0)  # after which each has been taken, or refused, since others came first
        refused = [work.result() if _is_refused(work) else None for work in works]
        if any(refused):
            return tuple(refused)
        replies = map(_said, await asyncio.gather(*works, return_exceptions=True))
        now = load()
        return tuple(reply if reply.load is None else reply._replace(load=now) for reply in replies)
    finally:
        for work in works:
            work.cancel()


def _is_refused(work: "asyncio.Future[Reply]") -> bool:
    if not work.done() or work.cancelled() or work.exception() is not None:
        return False
    reply = work.result()
    return isinstance(reply, Failure) and reply.code is ErrorCode.OVERLOADED


def _scores(task: object) -> bool:
    return isinstance(task, ScoreTask | LikelihoodTask)


def _said(reply: Reply | BaseException) -> Reply:
    """A task that raises, which is a fault of ours, is sent again alone: the others must not meet it."""
    if not isinstance(reply, BaseException):
        return reply
    log.error("A task of a convoy raised.", exc_info=reply)
    return Failure(ErrorCode.STEP_FAILED, "The server failed on this request.", None)


STOP_S = 10.0
LOST_STOP_S = 1.0
PACKAGES = ("torch", "transformers", "flashinfer-python", "triton")


class ReplicaServer:
    """Made, `start`ed, asked, `stop`ped. Every answer that is no exception of our own making is a value: a hostile
    task gives a `Failure`, never a crash."""

    def __init__(self, args: AppArgs, replica: str, deployment: str = "Replica") -> None:
        self._args = args
        self._replica = replica
        self._deployment = deployment
        self._limits = args.all_limits()
        self._metrics = ReplicaMetrics()
        self._ward = Ward()
        self._usage = Usage(args.engine.max_running)

    async def start(self, model: CausalLM | None = None) -> None:
        """Loads, checks, warms up and passes a first canary; raises where the replica must not serve."""
        started = time.perf_counter()
        self.engine = await asyncio.to_thread(self._make_engine, model)
        self.engine.start()
        self._card = self._make_card(self.engine)
        self._canary = Canary(self.engine, self._args.health.tolerance_nats)
        failure, seconds = await self._canary.run(timeout_s=max(60.0, self._args.health.timeout_s))
        self._progress("canary", seconds)
        if failure is not None:
            raise RuntimeError(f"The first canary failed: {failure}.")
        self._progress("total", time.perf_counter() - started)

    def stop(self) -> None:
        """A thread that does not turn is hardly waited for: it ends with the process."""
        self.engine.stop(LOST_STOP_S if self.engine.is_lost(self._args.health.step_timeout_s) else STOP_S)

    def _make_engine(self, model: CausalLM | None) -> Engine:
        config = self._args.engine_config()
        started = time.perf_counter()
        draft = None
        if model is None:
            model, draft = load_models(self._args.model, config, self._progress)
        if config.speculation.synthetic:
            log.warning("Drafts are accepted at set rates (synthetic): answers follow no law. For benchmarks only.")
        engine = Engine(model, config, limits=self._limits.sampling, draft=draft)
        engine.warm_up(self._progress)
        log.info("Model %s stands after %.1f s.", self._args.model.name, time.perf_counter() - started)
        return engine

    def _progress(self, stage: str, seconds: float) -> None:
        log.info("Start-up: %s took %.2f s.", stage, seconds)
        self._metrics.warmed_up(stage, seconds)

    def _make_card(self, engine: Engine) -> ModelCard:
        model = self._args.model
        return ModelCard(
            name=model.name,
            root=model.root,
            revision=model.revision,
            vocab_size=engine.model.vocab_size,
            max_model_len=engine.max_model_len,
            bos_token_id=engine.model.bos_token_id,
            eos_token_ids=engine.model.eos_token_ids,
            logprobs_mode=self._args.sampler.logprobs_mode,
            versions=package_versions(PACKAGES),
        )

    # Work.

    async def score(self, task: ScoreTask) -> ScoreReply | Failure:
        try:
            job = score_job(task, self._limits)
            with self._ward.admitted(task):
                found = await self.engine.score(job)
        except EngineError as error:
            return self._failure(error)
        self._metrics.waited(found.queue_s)
        return ScoreReply(
            found.label_logprobs,
            found.status,
            found.cached,
            found.queue_s,
            found.compute_s,
            self._load_now(),
            found.head_s,
        )

    async def likelihood(self, task: LikelihoodTask) -> LikelihoodReply | Failure:
        try:
            job = likelihood_job(task, self._limits)
            with self._ward.admitted(task):
                found = await self.engine.likelihood(job)
        except EngineError as error:
            return self._failure(error)
        self._metrics.waited(found.queue_s)
        return LikelihoodReply(
            found.logprobs,
            found.greedy,
            found.status,
            found.cached,
            found.queue_s,
            found.compute_s,
            self._load_now(),
            found.head_s,
        )

    async def together(self, convoy: Convoy) -> tuple[ScoreReply | LikelihoodReply | Failure | None, ...] | Failure:
        """Each task's own answer, in order; see `answered`."""
        return await answered(convoy, self.score, self.likelihood, self._refusals, self._load_now)

    def _refusals(self, tasks: Sequence[ScoreTask | LikelihoodTask]) -> list[Failure | None]:
        """Of those whom the queue would not take if they came now and in this order."""
        jobs = [scoring_job(task, self._limits) for task in tasks]  # without one, it will be told why when it comes
        full = EngineError(ErrorCode.OVERLOADED, "The queue is full.")
        return [None if taken else self._failure(full) for taken in self.engine.takes(jobs)]

    async def generate(self, task: GenerateTask) -> GenerateReply | Failure:
        """One chunk a branch, in order of prompt and branch. A prompt that fails ends the others: their client gets
        an error in any case."""
        try:
            jobs = self._generate_jobs(task)
            with self._ward.admitted(task):
                async with asyncio.TaskGroup() as group:
                    works = [group.create_task(self._whole(task, q, job)) for q, job in enumerate(jobs)]
        except EngineError as error:
            return self._failure(error)
        except BaseExceptionGroup as group_error:
            return self._failure(_first_engine_error(group_error))
        chunks = [chunk for work in works for chunk in work.result()]
        self._metrics.waited(min(item.chunk.queue_s for item in chunks if not isinstance(item.chunk, Failure)))
        return GenerateReply(tuple(chunks), task.epoch, self._load_now())

    def _generate_jobs(self, task: GenerateTask) -> list[GenerateRequest]:
        """One job a prompt. All are taken or none: a part of an answer is worth nothing."""
        jobs = generate_jobs(task, self._limits, self._card.vocab_size)
        if task.accepted or (len(jobs) == 1 and task.prompt_top is None):
            return jobs
        work: list[GenerateRequest | LikelihoodRequest] = [*jobs]
        if task.prompt_only and task.prompt_top is not None:
            work = [found for job in jobs if (found := prompt_job(job, task.prompt_top)) is not None]
        self.engine.check_room(work)
        return [replace(job, already_admitted=True) for job in jobs]

    async def _whole(self, task: GenerateTask, prompt: int, job: GenerateRequest) -> list[PromptChunk]:
        scores = await self._prompt_scores(task, job)
        found = [] if scores is None else [PromptChunk(prompt, scores)]
        if not task.prompt_only:
            found += [PromptChunk(prompt, chunk) for chunk in await self.engine.complete(job)]
        return found

    async def _prompt_scores(self, task: GenerateTask, job: GenerateRequest) -> PromptScores | None:
        """None where the task does not ask for them. The generation after it finds the prompt in the cache."""
        if task.prompt_top is None:
            return None
        scoring = prompt_job(job, task.prompt_top)
        if scoring is None:
            return PromptScores.of_one_token()
        found = await self.engine.likelihood(scoring)
        if (found.status != RowStatus.OK).any():
            raise EngineError(ErrorCode.NONFINITE_LOGITS, "The model's output for this request was not finite.")
        return PromptScores(
            found.logprobs,
            found.ranks,
            found.top_ids,
            found.top_logprobs,
            found.chosen_logprobs,
            found.queue_s,
            found.compute_s,
        )

    async def stream(self, task: GenerateTask) -> AsyncIterator[GenerateReply | Failure]:
        """What each step brought; while the consumer is busy, what came together is one message. A failed prompt is
        a Failure among the chunks, and the others go on."""
        try:
            jobs = self._generate_jobs(task)
            stay = self._ward.admit(task)
        except EngineError as error:
            yield self._failure(error)
            return
        pending = Pending(len(jobs))
        works = [asyncio.create_task(self._pump(task, q, job, pending)) for q, job in enumerate(jobs)]
        waited = False
        try:
            async for chunks in pending:
                if not waited:
                    waited = True
                    self._note_wait(chunks)
                stay.heard(chunks)
                yield GenerateReply(chunks, task.epoch, self._load_now())
        finally:  # also where the consumer has gone: nothing may go on computing
            for work in works:
                work.cancel()
            stay.over()
            await asyncio.gather(*works, return_exceptions=True)

    async def _pump(self, task: GenerateTask, prompt: int, job: GenerateRequest, pending: Pending) -> None:
        try:
            scores = await self._prompt_scores(task, job)
            if scores is not None:
                pending.add(PromptChunk(prompt, scores))
            if task.prompt_only:
                return
            async with contextlib.aclosing(self.engine.generate(job)) as chunks:
                async for chunk in chunks:
                    pending.add(PromptChunk(prompt, chunk))
        except EngineError as error:
            pending.add(PromptChunk(prompt, self._failure(error)))
        finally:
            pending.close_one()

    def _note_wait(self, chunks: Sequence[PromptChunk]) -> None:
        first = chunks[0].chunk
        if not isinstance(first, Failure):
            self._metrics.waited(first.queue_s)

    def _failure(self, error: EngineError) -> Failure:
        self._metrics.failed(error.code.value)
        load = self._load_now() if error.code is ErrorCode.OVERLOADED else None
        return Failure(error.code, error.message, error.field, load, error.accepted)

    def _load_now(self) -> Load:
        return Load(*self.engine.queue())

    # State.

    async def card(self) -> ModelCard:
        return self._card

    async def canary(self) -> CanaryReply:
        failure, seconds = await self._canary.run(self._args.health.timeout_s)
        return CanaryReply(self._replica, failure, seconds)

    async def quarantine(self, entries: Entries) -> None:
        """Requests to refuse from now on."""
        self._ward.quarantine.add(entries)

    async def collect(self) -> Snapshot:
        families = self._metrics.families(self.engine.stats(), self._card)
        return Snapshot(self._deployment, self._replica, families)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve every few seconds while autoscaling is on."""
        return self._usage.read(self.engine.stats())

    def check_health(self) -> None:
        """Raises if the engine is lost or its thread has not turned for too long: Serve then replaces us."""
        if not self.engine.is_lost(self._args.health.step_timeout_s):
            return
        if not self.engine.healthy:
            raise RuntimeError("The engine is not healthy.")
        raise RuntimeError(f"The step thread has not turned for {self._args.health.step_timeout_s:g} s.")


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed; our own first."""
    found = {}
    for package in ("assay-serve", *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package.removesuffix("-serve").removesuffix("-python")] = importlib.metadata.version(package)
    return found


def _first_engine_error(group: BaseExceptionGroup[BaseException]) -> EngineError:
    """The EngineError of a task group; anything else in it is a fault of ours and is raised."""
    errors = [error for error in group.exceptions if isinstance(error, EngineError)]
    if not errors or len(errors) < len(group.exceptions):
        raise group
    return min(errors, key=lambda error: error.code is ErrorCode.OVERLOADED)

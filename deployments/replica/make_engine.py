"""Makes the engine of a configuration, warmed up, as a replica serves it and `assay warm` does for its caches alone."""

import logging
import time
from typing import NamedTuple

from deployments.config.app_args import AppArgs
from engine.engine import Engine
from engine.model.interface import CausalLM
from engine.model.loader import load_models
from engine.model.weights_digest import joined_digest
from gpu_sampler.startup_progress import StartupProgress

log = logging.getLogger("ray.serve")


class WarmEngine(NamedTuple):
    """Holds an engine that is not started, and the digest of its weights."""

    engine: Engine
    weights_digest: str


def make_engine(
    args: AppArgs, progress: StartupProgress, model: CausalLM | None = None, *, complete: bool = False
) -> WarmEngine:
    """Loads what a configuration names, checks it and warms it up; raises where it must not be served.

    Args:
        args: The configuration.
        progress: Receives each stage.
        model: The model, for tests; None: it is loaded.
        complete: See `Engine.warm_up`.
    """
    config = args.engine_config()
    started = time.perf_counter()
    draft = None
    if model is None:
        model, draft = load_models(args.model, config, progress)
    if config.speculation.synthetic:
        log.warning(
            "Drafts are accepted at set rates (synthetic): answers follow no distribution. For benchmarks only."
        )
    digest = joined_digest(*(one.weights_digest for one in (model, draft) if one is not None))
    engine = Engine(model, config, limits=args.all_limits().sampling, draft=draft)
    engine.warm_up(progress, complete=complete)
    log.info("Model %s is ready after %.1f s.", args.model.name, time.perf_counter() - started)
    return WarmEngine(engine, digest)

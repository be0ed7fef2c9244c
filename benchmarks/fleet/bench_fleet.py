"""Measures scores and generations over 1, 2 and more replicas of one machine, and the failures when one is lost.

    python3 -m benchmarks.fleet.bench_fleet --model benchmarks/models/qwen3-0.6b --random-weights --replicas 1,2 \\
        --workloads rerank,classify,plain-64,streams-64,streams-256,mixed --paths http --seconds 8 \\
        --faults killed,frozen,drained --out benchmarks/results

It starts its own Ray in fast mode, with a GPU for each replica where there are any. The load is a closed loop with the
same number of requests in flight for each replica, sent by `--clients` processes: over HTTP with all ids as JSON, from
serialised bodies, and without HTTP from processes that each do an ingress's work (`handle`). Every request is new to
the prefix cache. `ratio` is items/s over those of the first number of replicas.

`plain-N` and `streams-N` keep N greedy generations under way for each replica, over HTTP only, each of 64 to 192 tokens
after 128; their `ratio` is that of tokens/s. `mixed` keeps 8 requests of `rerank` and 64 streams under way for each
replica (`mixed-S-N`: other numbers).

In the end, under `mixed` or else the first workload over HTTP, one replica is killed, frozen or drained, as `--faults`
says: `failed` counts the requests that were not answered with 200 or whose stream ended with an error, and
`lost_or_doubled_tokens` by how many tokens the generations that ended well are too short or too long.

`--prefix-trace` sends a trace of shared prefixes to the last number of replicas for so many seconds, and simulates it
(`benchmarks.fleet.prefix_trace`).

Without HAProxy, clients use the ingresses' own ports in turn, as HAProxy would. Results are written after every step,
and `--limit` ends the run at any point.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet.client_pool import ClientPool
from benchmarks.fleet.faults import FAULTS, struck
from benchmarks.fleet.load import SINGLES, FleetLoad, Workload, with_ratio, workload_of
from benchmarks.fleet.service import Fleet
from benchmarks.service.bench_service import served
from benchmarks.support.report import Row, table, write
from deployments.cli.launch import haproxy, system_info
from deployments.config.sections import ModelArgs
from engine.attention.flashinfer_backend import HEAD_DIMS
from engine.model.model_folder import find_folder

CUT_OFF = 3
WARM_LIMIT_S = 240.0
CORES_A_CLIENT = 4
MAX_CLIENTS = 8
CORES_AN_INGRESS = 3  # which spends 3 ms of processor time on a request, whatever its size
MAX_INGRESSES = 12
SPARE_S = 10.0  # in which the process that waits for a replica has imported what that needs, as in a service that runs


@dataclass(kw_only=True)
class ResultFile:
    """Writes each row to the disk immediately."""

    name: str
    notes: str
    out: Path | None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{time.monotonic() - STARTED:6.1f} s  {json.dumps(row)}", flush=True)
        if self.out is not None:
            write(self.name, self.rows, self.out, self.notes)


STARTED = time.monotonic()


def measure(fleet: Fleet, given: argparse.Namespace, record: ResultFile) -> None:
    numbers = iter(range(1, 1000))
    counts = [int(count) for count in given.replicas.split(",")]
    for count in counts:
        seconds = fleet.deploy(count, given.start_limit)
        record.add(
            {
                "case": f"start-up to {count} replicas",
                "replicas": count,
                "seconds": seconds,
                "addresses": len(fleet.urls),
            }
        )
        for path in given.paths.split(","):
            with loads(fleet, given, path) as load:
                for workload in given.workloads:
                    if workload.generations and path != "http":
                        continue
                    with reported(record, workload.name):
                        record.add(with_ratio(load.row(fleet, workload, next(numbers)), record.rows))
    if given.prefix_trace > 0:
        from benchmarks.fleet import prefix_trace  # which imports Ray's router: not before Ray has its environment

        scenario = prefix_trace.scenario(counts[-1], given.ingresses, given.prefix_trace, gpus=bool(fleet.gpus))
        with reported(record, "prefix trace"):
            for row in prefix_trace.rows(fleet, scenario, served(fleet.urls[0])[1]):
                record.add(row)
    if given.kill_limit <= 0 or counts[-1] < 2:
        return
    workload = next((one for one in given.workloads if one.scored and one.generations), given.workloads[0])
    for fault in given.faults:
        with reported(record, f"{workload.name}, one replica {fault}"):
            fleet.deploy(counts[-1], given.start_limit)  # the one before may have left fewer
            time.sleep(SPARE_S)
            with loads(fleet, given, "http") as load:
                record.add(struck(fleet, load, workload, next(numbers), fault, given.kill_limit, record.rows))


@contextlib.contextmanager
def loads(fleet: Fleet, given: argparse.Namespace, path: str) -> Iterator[FleetLoad]:
    """Runs the loads of one way to send requests, from processes of their own."""
    _, vocab = served(fleet.urls[0])
    with ClientPool(given.clients) as clients:
        yield FleetLoad(
            clients=clients, members=given.clients, path=path, at_once=given.at_once, seconds=given.seconds, vocab=vocab
        )


@contextlib.contextmanager
def reported(record: ResultFile, case: str) -> Iterator[None]:
    """Runs a load; one that fails becomes a row of its own."""
    try:
        yield
    except (RuntimeError, TimeoutError, OSError) as error:
        record.add({"case": case, "error": f"{type(error).__name__}: {error}"[:500]})


def arguments_of(given: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Returns the arguments of the application."""
    folder = find_folder(ModelArgs(path=given.model)) if given.model != "toy" else None
    model = {"path": str(folder.resolve()) if folder and given.model != "builtin" else given.model}
    if folder is not None and not (folder / "tokenizer.json").is_file():
        model["tokenizer_path"] = "builtin"  # requests are ids, and so are the answers that count
    share = {"num_gpus": 1, "num_cpus": 1} if gpus else {"num_cpus": 0.1}
    engine = {} if gpus else {"kv_slots": 65_536, "token_budget": 4096, "max_running": 64}  # as configs/cpu.yaml
    sections = {
        "model": model | {"served_name": Path(given.model).name, "random_weights": given.random_weights},
        "engine": engine,
        "ingress": {"count": given.ingresses},
        "replica": {"count": 1} | share,
    }
    more = given.args
    return sections | {name: sections.get(name, {}) | more[name] for name in more}


def warm(model: str) -> float:
    """Compiles FlashInfer's modules for the model in a process of its own, and returns the seconds. Replicas that start
    together would each wait for them. If it fails, the first replica tries again."""
    config = json.loads((find_folder(ModelArgs(path=model)) / "config.json").read_text("utf-8"))
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    stored = next((one for one in HEAD_DIMS if dim <= one), HEAD_DIMS[-1])
    command = [sys.executable, "-m", "engine.warmup.precompile_flashinfer", "--head-dims", str(stored)]
    started = time.monotonic()
    try:
        subprocess.run(command, check=True, timeout=WARM_LIMIT_S)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"FlashInfer's modules are not compiled ahead: {error}", flush=True)
    return time.monotonic() - started


def has_haproxy() -> bool:
    try:
        haproxy.find_binary()
    except haproxy.HAProxyMissing:
        return False
    return True


def workloads_of(words: str) -> list[Workload]:
    try:
        return [workload_of(name) for name in words.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def faults_of(words: str) -> list[str]:
    found = words.split(",")
    for fault in found:
        if fault not in FAULTS:
            raise argparse.ArgumentTypeError(f"fault must be one of {', '.join(FAULTS)}: {fault!r}")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cores = os.cpu_count() or 1
    ingresses = max(1, min(MAX_INGRESSES, cores // CORES_AN_INGRESS))
    clients = max(1, min(MAX_CLIENTS, cores // CORES_A_CLIENT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--model", default="builtin")
    option("--random-weights", action="store_true")
    option("--replicas", default="1,2", help="numbers of them, ascending")
    option("--workloads", type=workloads_of, default="rerank,long-query,classify")
    option("--paths", default="http,handle")
    option("--ingresses", type=int, default=ingresses, help="ingress replicas (by the machine's cores)")
    option("--clients", type=int, default=clients, help="client processes (by the machine's cores)")
    option("--at-once", type=int, help="scoring requests under way for each replica (32 on GPUs, 4 on a CPU)")
    option("--seconds", type=float, default=15.0, help="of each load; the middle three fifths count")
    option("--args", type=json.loads, default={}, help="more options of the application by section, as JSON")
    option("--plain", action="store_true", help="Serve's defaults in place of fast mode")
    option("--start-limit", type=float, default=240.0, help="seconds in which replicas must start")
    option("--prefix-trace", type=float, default=0.0, help="seconds of a trace of shared prefixes; 0: none")
    option("--faults", type=faults_of, default="killed", help=f"what happens to one replica: {', '.join(FAULTS)}")
    option("--kill-limit", type=float, default=60.0, help="seconds for a lost replica to be replaced; 0: none is lost")
    option("--limit", type=float, default=540.0, help="seconds after which the run ends wherever it is")
    option("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a step failed, `CUT_OFF` if the limit ended the run, else 0."""
    given, gpus = parse(arguments), len(system_info.gpus())
    given.at_once = given.at_once or (32 if gpus else 4)
    direct = not given.plain and not has_haproxy()
    front = "Serve's own proxy" if given.plain else "the ingresses' own ports" if direct else "HAProxy"
    record = ResultFile(
        name=f"fleet-{Path(given.model).name}",
        notes=f"{given.ingresses} ingresses behind {front}, {given.clients} client processes, {given.at_once} scoring "
        f"requests under way a replica ({SINGLES} times as many of one item), {given.seconds:g} s a load; load of the "
        f"machine before it: {system_info.load()}",
        out=given.out,
    )
    cut_off = threading.Timer(given.limit, _cut_off, (record,))
    cut_off.daemon = True
    cut_off.start()
    if gpus:
        record.add({"case": "FlashInfer's modules", "seconds": warm(given.model)})
    args = arguments_of(given, gpus)
    try:
        with Fleet.started(args, gpus=gpus, ingresses=given.ingresses, fast=not given.plain, direct=direct) as fleet:
            measure(fleet, given, record)
    except Exception as error:  # Ray raises what it likes; the rows before it are good
        print(error, file=sys.stderr, flush=True)
        record.add({"case": "ended", "error": f"{type(error).__name__}: {error}"[:500]})
    table(record.rows)
    return 1 if any("error" in row for row in record.rows) else 0


def _cut_off(record: ResultFile) -> None:
    table(record.rows)
    print("The limit has passed: what came before it is above.", file=sys.stderr, flush=True)
    os._exit(CUT_OFF)


if __name__ == "__main__":
    sys.exit(main())

#!/bin/sh
# Runs what needs a GPU, a stage at a time, on a machine whose python3 has torch and Triton for it:
#
#     sh benchmarks/gpu_session.sh OUT STAGE...     stages: suite paired kernels work startup http streams loads mixed numerics fleet
#
# Each stage writes its results below OUT and ends by itself; STAGE_S (default 540) bounds it in seconds. Variables:
#     BASE       a checkout to compare with, for `paired` and `fleet` (commit 635edbb, with the module paths of that commit)
#     COUNTS     numbers of replicas of `fleet` (default 1,2)
#     LOADERS    a folder with http_load.py, stream_load.py, workloads.py and mk_vocab.py, for `http` and `streams`
#     RESUME     the outcomes of an earlier `suite`: what passed on the same sources is left out
#     SHAPE      the model of `http` and `streams`: qwen3-0.6b (default) or qwen3-8b
#     INGRESSES  ingress replicas of `http` and `streams` (default 6)
#     SERVED     the checkout that `http` and `streams` serve (default: this one), and TAG, a word for the names of its results
#
# `paired`, `kernels` and `work` need no Ray. Nothing is installed: a stage whose packages are missing names them and ends.
set -u
test $# -ge 2 || { sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/.." || exit 2
out=$1; shift
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
limit=${STAGE_S:-540}
shape=${SHAPE:-qwen3-0.6b}
port=8000
server=0
served=${SERVED:-$PWD}
name=$shape${TAG:+-$TAG}
export PYTHONUNBUFFERED=1
{ nvidia-smi -L; nvidia-smi --query-gpu=driver_version --format=csv,noheader | sort -u; } | tee "$out/machine.txt"

# Each names a module; a stage that begins without them would fail in its middle.
needs() {
    python3 - "$@" <<'PY'
import sys
from importlib.util import find_spec
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
sys.exit(f"this python3 has no {', '.join(missing)}" if missing else 0)
PY
}
SERVED_WITH="ray fastapi msgspec transformers prometheus_client"

within() { timeout -s INT -k 20 "$limit" "$@"; }

suite() {
    needs $SERVED_WITH pytest xdist pytest_asyncio flashinfer || return 1
    within make test-gpu PYTHON=python3 OUTCOMES="$out/outcomes.jsonl" RESUME="${RESUME:-}" >"$out/suite.log" 2>&1
    tail -n 5 "$out/suite.log"
}

# The two checkouts take turns on one machine, since one machine's speed changes from minute to minute.
# Usage: pair NAME 'BASE MODULE AND ARGUMENTS' 'MODULE AND ARGUMENTS'
pair() {
    for round in 1 2; do
        (cd "$BASE" && PYTHONPATH="$BASE:${PYTHONPATH:-}" within python3 -m benchmarks.$2 --out "$out/base-$round") \
            >"$out/$1-base-$round.log" 2>&1 || echo "$1: base, round $round: exit $?"
        within python3 -m benchmarks.$3 --out "$out/here-$round" \
            >"$out/$1-here-$round.log" 2>&1 || echo "$1: here, round $round: exit $?"
    done
}

paired() {
    test -d "${BASE:-}" || { echo "paired: BASE must be a checkout"; return 1; }
    model="--model benchmarks/models/qwen3-0.6b --random-weights --rounds 2"
    large="--model benchmarks/models/qwen3-8b --draft benchmarks/models/qwen3-0.6b --random-weights"
    pair engine "bench_engine $model" "engine.bench_engine $model"
    pair sampler bench_sampler sampler.bench_sampler
    pair verify bench_verify sampler.bench_verify
    pair speculation "bench_speculation $large" "speculation.bench_speculation $large"
}

kernels() {
    within python3 -m benchmarks --only skinny-gemm,skinny-decode-attention,qk-norm-rope,pdl,lm-head --out "$out"
}

work() {
    within python3 -m benchmarks --only encoder-cuda,encoder-large,engine-0.6b,engine-8b --out "$out"
}

# Writes a configuration of $shape with random weights and a text for every token, and its folder.
configuration() {
    folder=$out/$shape
    mkdir -p "$folder"
    cp "benchmarks/models/$shape/config.json" "$folder/"
    (cd "$LOADERS" && python3 mk_vocab.py "$folder")
    cat >"$out/serve.yaml" <<YAML
proxy_location: HeadOnly
http_options: {host: 127.0.0.1, port: $port, request_timeout_s: 3610}
logging_config: {enable_access_log: false}
applications:
  - name: assay
    route_prefix: /
    import_path: deployments.app:build
    args:
      model: {path: $folder, device: cuda, random_weights: true, served_name: m}
      engine: {max_running: 256}
      replica: {num_cpus: 1, num_gpus: 1}
      ingress: {count: ${INGRESSES:-6}}
YAML
}

ready() {
    python3 - "$port" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/readyz", timeout=5)
PY
}

# Serves it in fast mode until `stop`, and prints the seconds to the first answer.
serve() {
    needs $SERVED_WITH flashinfer || return 1
    ready && { echo "another service answers on port $port"; return 1; }
    configuration
    since=$(date +%s)
    (cd "$served" && PYTHONPATH="$served:${PYTHONPATH:-}" exec setsid python3 -m deployments.cli serve --fast "$out/serve.yaml") \
        >"$out/serve.log" 2>&1 &
    server=$!
    until ready; do
        kill -0 $server 2>/dev/null || { tail -n 20 "$out/serve.log"; return 1; }
        test $(($(date +%s) - since)) -lt "$limit" || { echo "not ready in $limit s"; return 1; }
        sleep 1
    done
    echo "ready after $(($(date +%s) - since)) s" | tee -a "$out/startup.txt"
}

stop() { test $server -eq 0 || { kill -INT $server; wait $server; } 2>/dev/null; }

# The replica's parts of the last start, and when the controller, the application and its processes began.
parts() {
    grep -h "Start-up:\|Controller starting\|Imported and built\|initializing replica" /tmp/ray/session_latest/logs/serve/*.log |
        cut -c1-150 | sort -k 3
}

startup() {
    serve && stop && parts  # bare: everything is compiled
    serve && stop && parts  # warm: the caches of the first
    for module in deployments.cli.check.model deployments.replica.deployment; do  # that a start waits for
        echo "$module"
        python3 -X importtime -c "import $module" 2>&1 | sort -t'|' -k2 -n -r | head -n 40
    done
}

http() {
    serve || { stop; return 1; }
    load_plain
    stop
}

load_plain() {
    (cd "$LOADERS" && within python3 http_load.py "http://127.0.0.1:$port" m) | tee "$out/http-$name.jsonl"
}

streams() {
    serve || { stop; return 1; }
    load_streams
    stop
}

# The generator draws the same tokens in every run. Prompts of another length are other prompts, but for the first of each
# process, so that a run does not find those of the last one in the cache.
load_streams() {
    length=121
    for count in 1 16 64 256; do
        for how in "" --plain; do
            (cd "$LOADERS" && within python3 stream_load.py 127.0.0.1 $port --streams $count --prompt $length $how) |
                tee -a "$out/streams-$name.txt"
            length=$((length + 1))
        done
    done
}

# Both of them against one start.
loads() {
    serve || { stop; return 1; }
    load_plain
    load_streams
    stop
}

# Ragged scores, streams, and both together.
mixed() {
    serve || { stop; return 1; }
    within python3 -m benchmarks.service.bench_mixed "http://127.0.0.1:$port" --out "$out"
    stop
}

# The engine alone with either `engine.numerics`.
numerics() {
    for kind in fast invariant; do
        within python3 -m benchmarks.engine.bench_engine --model benchmarks/models/$shape --random-weights --rounds 2 \
            --numerics $kind --out "$out/$kind" >"$out/numerics-$kind.log" 2>&1 || echo "$kind: exit $?"
    done
}

# One replica and more, each with a GPU, and one of them lost in three ways; then the scores of BASE, where there is one.
fleet() {
    needs $SERVED_WITH flashinfer || return 1
    model="--model benchmarks/models/$shape --random-weights --replicas ${COUNTS:-1,2} --paths http --seconds 5"
    within python3 -m benchmarks.fleet.bench_fleet $model --faults killed,frozen,drained --limit "$limit" --out "$out/fleet" \
        --workloads rerank,long-query,classify,plain-64,plain-256,streams-64,streams-256,mixed | tee "$out/fleet.log"
    test -d "${BASE:-}" || return 0
    (cd "$BASE" && PYTHONPATH="$BASE:${PYTHONPATH:-}" within python3 -m benchmarks.bench_fleet $model --kill-limit 0 \
        --limit "$limit" --workloads rerank,long-query,classify --out "$out/fleet-base") | tee "$out/fleet-base.log"
}

status=0
for stage in "$@"; do
    case $stage in
        suite | paired | kernels | work | startup | http | streams | loads | mixed | numerics | fleet) echo "== $stage"; $stage || status=1 ;;
        *) echo "unknown stage: $stage" >&2; exit 2 ;;
    esac
done
exit $status

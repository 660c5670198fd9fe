#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What only whole runs of llama.cpp on a GPU show: text with tensors elsewhere, several sequences, replayed graphs, adapters,
reloads, more GPUs than one, RPC. Prints a line a case, and ends with 1 if one failed:

    CASE id pass|fail|skip detail

    run_cases.py HOST MODEL.gguf [--flashrt FILE] [--reload FILE] [--rpc-server FILE] [--only B16,B21]

HOST is a build of llama.cpp with the adapter (its tools lie there or in HOST/bin). --flashrt makes the random models that B08
and B22 need, --reload is bench/reload.c compiled, and the RPC server is looked for beside the tools. What is not there is
skipped, with the reason. Python's standard library is enough.

Two runs whose kernels are the same must give the same tokens. Where sums may come in another order, texts may part at a tie, as
`flashrt qualify` has it: the gap between the two tokens taken is at most four times the noise of such gaps over all steps that
the runs have in common.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROMPTS = [
    "The history of the printing press begins",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees Celsius at sea level because",
    "The main differences between TCP and UDP are:\n1.",
    "La capitale de la France est",
    "To be, or not to be, that is the question:",
    "Q: What is 17 times 23?\nA:",
    "A recipe for apple pie:\n-",
]
OFF = {"GGML_FLASHRT_DISABLE": "1"}
# Windows for many tokens at a time.
PREFILL = {"PREFILL_FA4", "GEGLU_FFN", "MM_RES", "MM_PREFILL", "MOE_FFN", "MOE_PREFILL"}
# Gaps up to this many times the noise are ties, and fewer common steps than these do not tell the noise.
TIE, LEAST_STEPS = 4, 50
START_S, ANSWER_S, TOOL_S = 120, 120, 120


class Fail(Exception):
    """What is wrong."""


class Skip(Exception):
    """Why a case cannot run here."""


class Programs:
    """llama.cpp's programs and how they are run."""

    def __init__(self, args, scratch):
        self.args, self.scratch = args, Path(scratch)
        host = Path(args.host).resolve()
        self.bin = host / "bin" if (host / "bin").is_dir() else host
        self.files = 0
        self.lock = threading.Lock()
        # With several GPUs in sight llama.cpp would spread the layers over them.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = visible.split(",") if visible else [str(i) for i in range(gpu_count())]

    def file(self, suffix):
        """A new name in the scratch folder."""
        with self.lock:
            self.files += 1
            return self.scratch / f"{self.files}{suffix}"

    def path(self, name):
        path = self.bin / name
        if not os.access(path, os.X_OK):
            raise Skip(f"{path} is missing")
        return str(path)

    def env(self, settings, gpus=1):
        env = {k: v for k, v in os.environ.items() if not k.startswith("GGML_")}
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(self.bin), env.get("LD_LIBRARY_PATH")]))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[:gpus])
        return {**env, **settings}

    def run(self, tool, *options, settings=None, path=None):
        """The output of a program that ends by itself, and its statistics."""
        stats = self.file(".json")
        env = self.env({"GGML_FLASHRT_STATS": str(stats), **(settings or {})})
        command = [path or self.path(tool), *map(str, options)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=TOOL_S)
        if done.returncode != 0:
            raise Fail(f"{tool} ended with {done.returncode}: {last_lines(done.stderr)}")
        return done.stdout + done.stderr, read_stats(stats)

    def must_have_fired(self, stats, where="", least=1):
        """Launches by the hook, of all windows together."""
        windows = (stats or {}).get("windows", {})
        fired = sum(w["fired"] for w in windows.values())
        if fired < least and not self.args.no_fired:
            declined = {}
            for window in windows.values():
                for reason, n in window["declined"].items():
                    declined[reason] = declined.get(reason, 0) + n
            raise Fail(f"no window fired{where}: {declined or 'no statistics'}")
        return fired


def gpu_count():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def gpu_memory_mib(gpu):
    """Memory in use on a GPU; None without one. Processes cannot be told apart in a container."""
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        query = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(query, capture_output=True, text=True, timeout=30).stdout)
    return None


def last_lines(text):
    return " | ".join(line.strip() for line in text.splitlines()[-3:]) or "it said nothing"


def read_stats(path):
    with contextlib.suppress(OSError, ValueError):
        return json.loads(Path(path).read_text())
    return None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Process:
    """A program that serves until it is told to end."""

    def __init__(self, programs, command, settings, gpus=1):
        self.log, self.stats_file = programs.file(".log"), programs.file(".json")
        env = programs.env({"GGML_FLASHRT_STATS": str(self.stats_file), **settings}, gpus)
        with open(self.log, "wb") as log:
            self.child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_until(self, ready):
        deadline = time.monotonic() + START_S
        while not ready():
            if self.child.poll() is not None:
                raise Fail(f"{self.child.args[0]} ended: {last_lines(self.log.read_text(errors='replace'))}")
            if time.monotonic() > deadline:
                raise Fail(f"{self.child.args[0]} was not ready after {START_S} s")
            time.sleep(0.1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(30)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        self.stats = read_stats(self.stats_file)


class Server(Process):
    """llama-server."""

    def __init__(self, programs, *options, settings=None, gpus=1, model=None, context=2048):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        layers = ["-ngl", "99", "-fa", "on", "-c", context]
        model = ["-m", model or programs.args.model]
        # What a request leaves in a cache must not help the next: all texts begin alike.
        caches = ["--cache-ram", "0", "--port", port]
        command = [programs.path("llama-server"), *model, *layers, *caches, *options]
        super().__init__(programs, list(map(str, command)), settings or {}, gpus)
        try:
            self.wait_until(self.healthy)
        except Fail:
            self.__exit__()
            raise

    def healthy(self):
        with contextlib.suppress(OSError):
            return self.request("/health") is not None
        return False

    def request(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.loads(answer.read())

    def generate(self, prompts, n, candidates=0):
        """The answers to all prompts at once, as many as there are slots: greedy continuations."""
        body = {"prompt": prompts, "n_predict": n, "temperature": 0.0, "seed": 1, "ignore_eos": True}
        try:
            answer = self.request("/completion", {**body, "cache_prompt": False, "n_probs": candidates})
        except (OSError, ValueError) as e:
            raise Fail(f"llama-server did not answer: {e}; {last_lines(self.log.read_text(errors='replace'))}") from e
        answers = answer if isinstance(answer, list) else [answer]
        return sorted(answers, key=lambda a: a.get("index", 0))

    def texts(self, prompts, n):
        return [Text.read(answer) for answer in self.generate(prompts, n, 10)]

    def one_by_one(self, prompts, n):
        return [self.texts(p, n)[0] for p in prompts]


@dataclass
class Text:
    tokens: list
    # Of each step: log-probability by token, the likeliest first.
    top: list

    @staticmethod
    def read(answer):
        steps = answer["completion_probabilities"]
        top = [{c["id"]: c["logprob"] for c in s["top_logprobs"]} for s in steps]
        return Text([s["id"] for s in steps], top)


def same(a, b, what):
    """Both runs gave the same tokens."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x.tokens != y.tokens:
            at = common_steps(x, y)
            raise Fail(f"{what}: text {i} parts at token {at} of {len(x.tokens)}")
    if len(a) != len(b):
        raise Fail(f"{what}: {len(a)} texts and {len(b)}")


def common_steps(a, b):
    return next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), min(len(a.tokens), len(b.tokens)))


def alike(a, b):
    """Both runs gave the same texts up to ties; says how many are the same and where the others part."""
    noise, partings = [], []
    for i, (x, y) in enumerate(zip(a, b)):
        at = common_steps(x, y)
        for s, t in zip(x.top[:at], y.top[:at]):
            p, q = list(s)[:2]
            if p in t and q in t:
                noise.append((s[p] - s[q]) - (t[p] - t[q]))
        if at < max(len(x.tokens), len(y.tokens)):
            partings.append((i, at))
    rms = math.sqrt(sum(n * n for n in noise) / max(len(noise), 1))
    detail = f"{len(a) - len(partings)} of {len(a)} texts the same"
    for i, at in partings:
        if at >= min(len(a[i].tokens), len(b[i].tokens)):
            raise Fail(f"{detail}; text {i} ends at token {at} in one run")
        x, y = a[i].tokens[at], b[i].tokens[at]
        gaps = [s[own] - s[other] if other in s else math.inf for s, own, other in ((a[i].top[at], x, y), (b[i].top[at], y, x))]
        detail += f", text {i} parts at {at} (gaps {gaps[0]:.3f} and {gaps[1]:.3f})"
        if len(noise) < LEAST_STEPS:
            raise Fail(f"{detail}; {len(noise)} common steps are too few to know the noise")
        if max(gaps) > TIE * rms:
            raise Fail(f"{detail}: no tie, as the noise is {rms:.4f}")
    return f"{detail}; noise {rms:.4f}"


CASES = {}


def case(name):
    def register(function):
        CASES[name] = function
        return function

    return register


@case("B06")
def tensors_on_the_cpu(p):
    """The scheduler cuts the graph and puts copies in: windows must see what the operands are now."""
    with Server(p) as whole:
        expected = whole.one_by_one(PROMPTS, 96)
    with Server(p, "-ot", r"blk\.(3|7)\.ffn_.*=CPU") as split:
        got = split.one_by_one(PROMPTS, 96)
    detail = alike(expected, got)
    return f"{detail}; fired {p.must_have_fired(split.stats)}"


@case("B08")
def experts_at_small_batches(p):
    """One to nine tokens at a time: no farther from the dequantised model than without windows, by three standard errors. With
    random weights the experts' gates are close to one another, and any rounding chooses others: nearness to stock says nothing."""
    model = synthetic(p, "qwen3-moe", 1, "--layers", p.args.moe_layers)
    exact = p.file(".gguf")
    p.run("llama-quantize", "--allow-requantize", model, exact, "F16", settings=OFF)
    corpus, logits = p.file(".txt"), p.file(".logits")
    words = random.Random(8)
    corpus.write_text(" ".join(words.choice(" ".join(PROMPTS).split()) for _ in range(700)))
    common = ["-ngl", 99, "-fa", "on", "-c", 128, "-b", 128, "--chunks", 2, "--kl-divergence-base", logits]
    p.run("llama-perplexity", "-m", exact, *common, "-f", corpus, settings=OFF)

    def distance(ubatch, settings):
        text, stats = p.run("llama-perplexity", "-m", model, *common, "--kl-divergence", "-ub", ubatch, settings=settings)
        found = re.search(r"Mean +KLD: +(\S+) ± +(\S+)", text)
        if not found:
            raise Fail(f"llama-perplexity printed no divergence: {last_lines(text)}")
        return float(found[1]), float(found[2]), stats

    # By default the windows with experts leave so few tokens to stock: the third arm asks for them.
    settings = [{}, {"GGML_FLASHRT_MM_MIN_TOKENS": "1"}, OFF]
    with ThreadPoolExecutor(p.args.jobs) as pool:
        runs = [[pool.submit(distance, u, s) for u in range(1, 10)] for s in settings]
        default, experts, off = ([f.result() for f in arm] for arm in runs)
    shown = []
    for ubatch, arms in enumerate(zip(default, experts, off), 1):
        without = arms[2]
        for arm, on in zip(("windows", "windows with experts"), arms):
            p.must_have_fired(on[2], f" at -ub {ubatch}")
            if not on[0] <= without[0] + 3 * math.hypot(on[1], without[1]):
                raise Fail(f"KL divergence at -ub {ubatch}: {on[0]} ± {on[1]} with {arm}, {without[0]} ± {without[1]} without")
        if not p.args.no_fired and not all(arms[1][2]["windows"][w]["fired"] for w in ("MOE_FFN", "MOE_PREFILL")):
            raise Fail(f"no window with experts fired at -ub {ubatch}")
        shown.append("/".join(f"{a[0]:.4f}" for a in arms))
    return f"KL divergence on/with experts/off at -ub 1 to 9: {' '.join(shown)}"


@case("B11")
def sequences_on_streams(p):
    """GGML_CUDA_GRAPH_OPT=1 above batch 1: two sequences, for which mat-vec windows fire, and eight, for which norms do."""
    details = []
    for n in (2, 8):
        runs = []
        for settings in ({}, {"GGML_CUDA_GRAPH_OPT": "1"}):
            with Server(p, "-np", n, settings=settings, context=1024 * n) as server:
                runs.append(server.texts(PROMPTS[:n], 96))
            p.must_have_fired(server.stats)
        details.append(f"{n} sequences: {alike(*runs)}")
    return "; ".join(details)


@case("B16")
def past_the_padding_of_the_cache(p):
    """A replayed graph must not keep the length of the cache: it is padded to 256, so decode past 256 and 512."""
    runs = []
    for settings in ({}, {"GGML_CUDA_DISABLE_GRAPHS": "1"}):
        with Server(p, settings=settings) as server:
            runs.append(server.texts(PROMPTS[0], 600))
        p.must_have_fired(server.stats)
    same(*runs, "CUDA graphs on and off")
    return f"{len(runs[0][0].tokens)} tokens the same with CUDA graphs and without"


@case("B21")
def adapter_scales(p):
    """A LoRA's scale changes between requests of one process: windows decline or match."""
    lora = p.file(".gguf")
    write_lora(lora, p.args.model)
    prompts, n = PROMPTS, 64
    # One slot: with several, what other slots still hold changes how keys are split among blocks, and ties.
    with Server(p, "-np", 1) as plain:
        without = plain.one_by_one(prompts, n)
    by_scale = {}
    for settings, arm in (({}, "on"), (OFF, "off")):
        with Server(p, "-np", 1, "--lora", lora, "--lora-init-without-apply", settings=settings) as server:
            for scale in (0.0, 1.0, 0.0, 0.5, 1.0):
                server.request("/lora-adapters", [{"id": 0, "scale": scale}])
                got = server.one_by_one(prompts, n)
                same(by_scale.setdefault((arm, scale), got), got, f"scale {scale}, windows {arm}, a second time")
        if arm == "on":
            fired = p.must_have_fired(server.stats)
    same(without, by_scale["on", 0.0], "scale 0 and no adapter")
    if all(a.tokens == b.tokens for a, b in zip(without, by_scale["on", 1.0])):
        raise Fail("the adapter changes nothing: this shows nothing")
    detail = alike(by_scale["on", 1.0], by_scale["off", 1.0])
    return f"scale 0 as without; the same again after other scales; on and off at scale 1: {detail}; fired {fired}"


@case("B22")
def another_model_in_its_place(p):
    """A model is freed and another of the same shapes loaded, likely at the same addresses: nothing of the first is left."""
    reload = p.args.reload
    if not reload:
        raise Skip("no --reload: compile bench/reload.c")
    a, b = (synthetic(p, "gemma3-270m", seed) for seed in (1, 2))
    alone = [p.run("reload", 64, model, path=reload)[0].split("tokens: ")[1].split("\n")[0] for model in (a, b)]
    text, stats = p.run("reload", 64, a, b, a, path=reload)
    got = [line.split(": ")[1] for line in text.splitlines() if line.startswith("tokens: ")]
    if alone[0] == alone[1]:
        raise Fail("both models say the same: this shows nothing")
    if got != [alone[0], alone[1], alone[0]]:
        raise Fail(f"models A, B, A in one process do not say what they say alone: {got} instead of {alone}")
    return f"A, B, A in one process as each alone; fired {p.must_have_fired(stats)}"


@case("two-slots")
def two_slots(p):
    """Two requests at once, each as alone."""
    with Server(p, "-np", 2, context=4096) as server:
        alone = server.one_by_one(PROMPTS, 128)
        together = [text for i in range(0, len(PROMPTS), 2) for text in server.texts(PROMPTS[i : i + 2], 128)]
    return f"{alike(alone, together)}; fired {p.must_have_fired(server.stats)}"


@case("B24")
def long_prompts_on_four_slots(p):
    """Prompts longer than a sliding window, on four slots at once: the same keys are seen as without windows."""
    words = random.Random(24)
    known = " ".join(PROMPTS).split()
    prompts = [" ".join(words.choices(known, k=700)) + "\n" + start for start in PROMPTS[:4]]
    runs = []
    for settings in ({}, OFF):
        with Server(p, "-np", 4, "-ub", 2048, "-b", 2048, settings=settings, context=8192) as server:
            runs.append(server.texts(prompts, 96))
        if not settings:
            fired = p.must_have_fired(server.stats)
            prefill = {n: w["fired"] for n, w in (server.stats or {}).get("windows", {}).items() if n in PREFILL and w["fired"]}
    return f"{alike(*runs)}; fired {fired}, of those for prompts {prefill or 'none'}"


@case("two-gpus")
def two_gpus(p):
    """Layers over two GPUs: two contexts, and copies between them."""
    if len(p.gpus) < 2:
        raise Skip(f"{len(p.gpus)} GPUs")
    with Server(p) as one:
        expected = one.one_by_one(PROMPTS, 96)
    with Server(p, "-sm", "layer", "-ts", "1,1", gpus=2) as two:
        got = two.one_by_one(PROMPTS, 96)
    fired = p.must_have_fired(two.stats, least=2)
    return f"{alike(expected, got)}; fired {fired}"


@case("rpc")
def rpc(p):
    """A server that knows tensors and graphs, but not what its buffers are for."""
    names = ("ggml-rpc-server", "rpc-server")
    beside = (str(p.bin / n) for n in names if os.access(p.bin / n, os.X_OK))
    program = p.args.rpc_server or next(beside, None)
    if not program:
        raise Skip(f"no {' or '.join(names)} in {p.bin}, and no --rpc-server")
    with Server(p) as local:
        expected = local.one_by_one(PROMPTS, 96)
    port = free_port()
    with Process(p, [program, "-H", "127.0.0.1", "-p", str(port)], {}) as remote:

        def listening():
            with socket.socket() as s:
                return s.connect_ex(("127.0.0.1", port)) == 0

        remote.wait_until(listening)
        # Nothing is left for the client to compute but what the CPU does anyway.
        with Server(p, "--rpc", f"127.0.0.1:{port}", gpus=0) as client:
            got = client.one_by_one(PROMPTS, 96)
        # The statistics of a server that is killed are a second old.
        time.sleep(1.5)
    return f"{alike(expected, got)}; fired {p.must_have_fired(remote.stats, ' on the server')} on the server"


@case("B18")
def varied_requests(p):
    """Hundreds of different requests: what the process holds at the end is what it held after the first part."""
    grown = {}
    for arm, settings in (("on", {}), ("off", OFF)):
        with Server(p, "-np", 4, settings=settings, context=4096) as server:
            lengths = random.Random(18)
            words = " ".join(PROMPTS).split()
            requests = [
                (" ".join(lengths.choices(words, k=lengths.randint(1, 120))), lengths.randint(1, 24))
                for _ in range(p.args.requests)
            ]

            def held():
                status = Path(f"/proc/{server.child.pid}/status").read_text()
                resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) // 1024
                return resident, gpu_memory_mib(p.gpus[0]) if p.gpus else None

            warm = len(requests) // 5
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda r: server.generate(*r), requests[:warm]))
                before = held()
                list(pool.map(lambda r: server.generate(*r), requests[warm:]))
                after = held()
        grown[arm] = [None if a is None else a - b for a, b in zip(after, before)]
        if arm == "on":
            fired = p.must_have_fired(server.stats)
    # The server and ggml grow by themselves; the adapter's plans and arena stay within a few MiB.
    for what, on, off in zip(("main memory", "GPU memory"), grown["on"], grown["off"]):
        if on is not None and on > max(off, 0) + 32:
            raise Fail(f"{what} grew by {on} MiB with windows and by {off} MiB without")
    (rss, gpu), (rss_off, gpu_off) = grown["on"], grown["off"]
    shown = "not measured" if gpu is None else f"{gpu:+} MiB (off {gpu_off:+})"
    return f"{len(requests)} requests: main memory {rss:+} MiB (off {rss_off:+}), GPU memory {shown}; fired {fired}"


# Measures memory, so nothing else may run beside it.
ALONE = ["B18"]


def synthetic(p, kind, seed, *options):
    """A model with random weights."""
    if not p.args.flashrt:
        raise Skip("no --flashrt to make a model with")
    path = p.file(".gguf")
    done = subprocess.run(
        [p.args.flashrt, "synth", kind, str(path), "--seed", str(seed), *map(str, options)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Fail(f"flashrt synth: {last_lines(done.stderr)}")
    return path


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def gguf_shapes(path):
    """Architecture of a GGUF file, and the dimensions of its tensors."""
    with open(path, "rb") as f:

        def number(kind):
            size = struct.calcsize("<" + kind)
            return struct.unpack("<" + kind, f.read(size))[0]

        def string():
            return f.read(number("Q")).decode()

        def value(kind):
            if kind == STRING:
                return string()
            if kind == ARRAY:
                kind, n = number("I"), number("Q")
                if kind in SCALARS:
                    f.seek(n * struct.calcsize("<" + SCALARS[kind]), os.SEEK_CUR)
                    return None
                return [value(kind) for _ in range(n)]
            return number(SCALARS[kind])

        if f.read(4) != b"GGUF":
            raise Fail(f"{path} is no GGUF file")
        number("I")
        n_tensors, n_keys = number("Q"), number("Q")
        keys = {}
        for _ in range(n_keys):
            key = string()
            keys[key] = value(number("I"))
        shapes = {}
        for _ in range(n_tensors):
            name = string()
            shapes[name] = [number("Q") for _ in range(number("I"))]
            number("I"), number("Q")
        return keys["general.architecture"], shapes


def write_lora(path, model, rank=16):
    """A small adapter with random weights for every matrix of the first two layers, in F16."""
    f16 = 1
    architecture, shapes = gguf_shapes(model)
    weights = random.Random(21)
    tensors = []
    for name, dims in shapes.items():
        if re.fullmatch(r"blk\.[01]\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight", name):
            k, rows = dims
            # Adds 0.3 times the root mean square of the input to each value of the product: enough for another text.
            tensors.append((name + ".lora_a", [k, rank], 1 / math.sqrt(k)))
            tensors.append((name + ".lora_b", [rank, rows], 0.3 / math.sqrt(rank)))
    if not tensors:
        raise Skip(f"the adapter for {architecture} would be empty")

    def string(s):
        return struct.pack("<Q", len(s)) + s.encode()

    def key(name, kind, value):
        return string(name) + struct.pack("<I", kind) + value

    keys = [
        key("general.type", STRING, string("adapter")),
        key("general.architecture", STRING, string(architecture)),
        key("adapter.type", STRING, string("lora")),
        key("adapter.lora.alpha", 6, struct.pack("<f", float(rank))),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    data = b""
    for name, dims, sigma in tensors:
        head += string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", f16, len(data))
        n = math.prod(dims)
        data += struct.pack(f"<{n}e", *(weights.gauss(0, sigma) for _ in range(n)))
        data += bytes(-len(data) % 32)
    Path(path).write_bytes(head + bytes(-len(head) % 32) + data)


def run(name, programs):
    """One case's line."""
    begun = time.monotonic()
    try:
        verdict, detail = "pass", CASES[name](programs)
    except Skip as e:
        verdict, detail = "skip", str(e)
    except Fail as e:
        verdict, detail = "fail", str(e)
    except Exception as e:  # a case that breaks must not hide the others
        verdict, detail = "fail", f"{type(e).__name__}: {e}"
    detail = " ".join(str(detail).split())
    print(f"CASE {name} {verdict} {detail} [{time.monotonic() - begun:.0f} s]", flush=True)
    return verdict


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", metavar="HOST")
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--flashrt", metavar="FILE", help="the flashrt command")
    parser.add_argument("--reload", metavar="FILE", help="bench/reload.c, compiled")
    parser.add_argument("--rpc-server", metavar="FILE")
    parser.add_argument("--only", metavar="IDS", type=lambda s: s.split(","), help=", ".join(CASES))
    parser.add_argument("--jobs", type=int, default=4, help="cases, or processes of a case, at a time")
    parser.add_argument("--requests", type=int, default=500, help="requests of B18")
    parser.add_argument("--moe-layers", type=int, default=2, help="layers of B08's model")
    parser.add_argument("--no-fired", action="store_true", help="windows need not fire: to try the script out without a GPU")
    args = parser.parse_args()
    unknown = set(args.only or ()) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if not os.path.isfile(args.model):
        parser.error(f"{args.model}: no such file")
    scratch = tempfile.mkdtemp(prefix="cases")
    try:
        programs = Programs(args, scratch)
        wanted = [name for name in CASES if not args.only or name in args.only]
        with ThreadPoolExecutor(args.jobs) as pool:
            beside = [name for name in wanted if name not in ALONE]
            verdicts = list(pool.map(lambda name: run(name, programs), beside))
        verdicts += [run(name, programs) for name in wanted if name in ALONE]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(", ".join(f"{verdicts.count(v)} {v}" for v in ("pass", "fail", "skip")))
    return 1 if "fail" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())

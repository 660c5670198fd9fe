#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the time of one evaluation (one token, in decode) goes, from a trace that bench/kernel_trace.c wrote.

    kernel_trace.py trace.jsonl [--split graph|upload|gap] [--kind N] [--device N] [--launches] [--json]

The trace is cut into evaluations: at each CUDA graph launch (graph), at each run of host-to-device copies, with which llama.cpp
sets a graph's inputs (upload), or where the GPU idles longer than --gap-us (gap). By default the first of graph and upload that
cuts at all. Evaluations of the same kernels and counts are one kind; the kind seen most often is shown, --kind picks another.
An evaluation lasts until the next one starts, so its idle time includes the host's; the last of all has no known end and is
left out.

Every figure is a median over the evaluations of the kind. Per name: launches, median duration of one, sum of durations, and
"advance", the time by which they move the latest end seen so far: where kernels overlap (programmatic dependent launch,
streams), durations count waiting and add up to more than passed, advances add up to the busy time. Share is advance over wall.
--launches adds the same launch by launch, in the order in which they start, over the evaluations that share the usual order.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median

VERSION = 1


class TraceError(Exception):
    """What is wrong with a trace, and what to do about it."""


@dataclass(frozen=True)
class Record:
    name: int
    start: int
    end: int
    device: int
    stream: int
    graph: int
    correlation: int
    size: int


def read(path):
    """The header and the records, by start."""
    try:
        with open(path, encoding="utf-8") as file:
            header = json.loads(file.readline())
            if header.get("format") != "kernel_trace" or header.get("version") != VERSION:
                raise TraceError(f"{path}: not a kernel trace of version {VERSION}")
            records = [Record(*json.loads(line)) for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: damaged or cut short: {error}") from error
    return header, sorted(records, key=lambda r: (r.start, r.end))


def demangle(names):
    """Readable names without return type and parameters; as they are when there is no c++filt."""
    texts = [n["name"] for n in names]
    if tool := shutil.which("c++filt"):
        out = subprocess.run([tool], input="\n".join(texts), capture_output=True, text=True, check=True).stdout
        texts = [without_parameters(t) for t in out.split("\n")]
    return texts


def without_parameters(text):
    """`void f<int>(float*)` becomes `f<int>`."""
    depth = 0
    for i in range(len(text) - 1, -1, -1) if text.endswith(")") else ():
        depth += {")": 1, "(": -1}.get(text[i], 0)
        if depth == 0:
            text = text[:i]
            break
    return text.removeprefix("void ")


def starts_by_graph(records):
    seen = set()
    for i, r in enumerate(records):
        if r.graph and r.correlation not in seen:
            seen.add(r.correlation)
            yield i


def starts_by_upload(records, kinds):
    uploading = False
    for i, r in enumerate(records):
        upload = kinds[r.name] == "memcpy HtoD"
        if upload and not uploading:
            yield i
        uploading = upload


def starts_by_gap(records, gap_ns):
    frontier = 0
    for i, r in enumerate(records):
        if r.start - frontier > gap_ns:
            yield i
        frontier = max(frontier, r.end)


def split(records, kinds, how, gap_ns):
    """The evaluations, each with the start of the next, and how they were cut."""
    cuts = {
        "graph": lambda: list(starts_by_graph(records)),
        "upload": lambda: list(starts_by_upload(records, kinds)),
        "gap": lambda: list(starts_by_gap(records, gap_ns)),
    }
    for name in [how] if how else ["graph", "upload"]:
        starts = cuts[name]()
        if len(starts) > 1:
            pairs = zip(starts, starts[1:])
            return [(records[a:b], records[b].start) for a, b in pairs], name
    raise TraceError("fewer than two evaluations found; trace a longer run, or cut it another way with --split")


def advances(records):
    """How far each record moves the latest end; their sum is the time in which anything ran."""
    frontier = records[0].start
    for r in records:
        yield max(0, r.end - max(r.start, frontier))
        frontier = max(frontier, r.end)


def summarise(evaluations, names, kinds):
    """Medians over evaluations of one kind, in microseconds."""
    launches, durations = Counter(r.name for r in evaluations[0][0]), defaultdict(list)
    sums, moved = defaultdict(list), defaultdict(list)
    walls, busy, idle = [], [], []
    for records, end in evaluations:
        duration, advance = Counter(), Counter()
        for r, forward in zip(records, advances(records)):
            durations[r.name].append(r.end - r.start)
            duration[r.name] += r.end - r.start
            advance[r.name] += forward
        for name in launches:
            sums[name].append(duration[name])
            moved[name].append(advance[name])
        walls.append(end - records[0].start)
        busy.append(sum(advance.values()))
        idle.append(walls[-1] - busy[-1])

    us = lambda values: median(values) / 1e3
    wall = us(walls)
    rows = [
        {
            "name": names[n],
            "kind": kinds[n].split()[0],
            "count": count,
            "median_us": us(durations[n]),
            "sum_us": us(sums[n]),
            "advance_us": us(moved[n]),
            "share": us(moved[n]) / wall,
        }
        for n, count in launches.items()
    ]
    return {
        "evaluations": len(evaluations),
        "wall_us": wall,
        "busy_us": us(busy),
        "idle_us": us(idle),
        "kernels": sum(r["count"] for r in rows if r["kind"] == "kernel"),
        "copies_and_sets": sum(r["count"] for r in rows if r["kind"] != "kernel"),
        "rows": sorted(rows, key=lambda r: -r["advance_us"]),
    }


def sequence(evaluations, names):
    """Each launch of the most frequent order: medians in microseconds, from the start of the evaluation."""
    orders = defaultdict(list)
    for records, _ in evaluations:
        orders[tuple(r.name for r in records)].append(records)
    usual = max(orders.values(), key=len)
    columns = zip(zip(*usual), zip(*(advances(records) for records in usual)))
    return [
        {
            "name": names[launches[0].name],
            "start_us": median(r.start - first[0].start for r, first in zip(launches, usual)) / 1e3,
            "duration_us": median(r.end - r.start for r in launches) / 1e3,
            "advance_us": median(forward) / 1e3,
        }
        for launches, forward in columns
    ]


def analyse(args):
    header, records = read(args.trace)
    # Copies and memsets are named after their kind; kernels could be named anything.
    kinds = [n["kind"] if n["kind"] == "kernel" else n["name"] for n in header["names"]]
    records = [r for r in records if r.device == args.device]
    if not records:
        raise TraceError(f"{args.trace}: nothing recorded on device {args.device}")
    evaluations, how = split(records, kinds, args.split, args.gap_us * 1e3)

    groups = defaultdict(list)
    for evaluation in evaluations:
        groups[frozenset(Counter(r.name for r in evaluation[0]).items())].append(evaluation)
    groups = sorted(groups.values(), key=len, reverse=True)
    if not 1 <= args.kind <= len(groups):
        raise TraceError(f"--kind {args.kind}: there are {len(groups)} kinds of evaluations")
    names = demangle(header["names"])
    chosen = groups[args.kind - 1]
    return {
        "split": how,
        "kind": args.kind,
        "kinds": [{"evaluations": len(g), "records": len(g[0][0])} for g in groups],
        "dropped": header["dropped"],
        "untimed": header["untimed"],
        "overwritten": header["overwritten"],
        **summarise(chosen, names, kinds),
        **({"launches": sequence(chosen, names)} if args.launches else {}),
    }


def table(result, width):
    """The result for people."""
    fit = lambda name: name if len(name) <= width else name[: width - 3] + "..."
    lost = [f"{result[k]} {k}" for k in ("dropped", "untimed", "overwritten") if result[k]]
    kinds = result["kinds"][:8]
    listing = ", ".join(f"{i}: {k['evaluations']} x {k['records']} records" for i, k in enumerate(kinds, 1))
    yield f"cut by {result['split']}; kinds of evaluations: {listing}{', ...' if len(result['kinds']) > len(kinds) else ''}"
    if lost:
        yield f"records lost: {', '.join(lost)}"
    yield (
        f"kind {result['kind']}: wall {result['wall_us']:.1f} us, busy {result['busy_us']:.1f}, idle {result['idle_us']:.1f}; "
        f"{result['kernels']} kernels, {result['copies_and_sets']} copies and memsets; "
        f"durations add up to {sum(r['sum_us'] for r in result['rows']):.1f}"
    )
    yield f"{'count':>6} {'median us':>10} {'sum us':>9} {'advance us':>11} {'share':>6}  name"
    for r in result["rows"]:
        yield (
            f"{r['count']:>6} {r['median_us']:>10.2f} {r['sum_us']:>9.1f} {r['advance_us']:>11.1f} "
            f"{r['share']:>6.1%}  {fit(r['name'])}"
        )
    if "launches" in result:
        yield f"{'start us':>9} {'duration us':>12} {'advance us':>11}  name"
    for r in result.get("launches", []):
        yield f"{r['start_us']:>9.1f} {r['duration_us']:>12.2f} {r['advance_us']:>11.2f}  {fit(r['name'])}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--split", choices=["graph", "upload", "gap"])
    parser.add_argument("--gap-us", type=float, default=50.0, metavar="US")
    parser.add_argument("--kind", type=int, default=1, metavar="N")
    parser.add_argument("--device", type=int, default=0, metavar="N")
    parser.add_argument("--width", type=int, default=100, help="columns for a name", metavar="N")
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        result = analyse(args)
    except TraceError as error:
        sys.exit(f"kernel_trace: {error}")
    print(json.dumps(result, indent=2) if args.json else "\n".join(table(result, args.width)))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the mat-mul kernels take: seconds to compile, registers, spills, stages and shared memory of each.

    mm_table.py NVCC [-j N] [FORMAT...]      FORMAT as in csrc/mm/mm_<format>.cu; all without one

Files are compiled from scratch, N at a time (2), for sm_90a. Registers and spills are ptxas's; kernels set their warps' shares of the
registers themselves. Stages (of activations), spans (of raw weights) and shared memory follow from csrc/mm/mm.cuh.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-O3", "-std=c++17", '-DFRT_ARCHS="sm_90a"', "-gencode", "arch=compute_90a,code=sm_90a", "-I", str(ROOT / "csrc")]
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w*mm_kernel\w*)' for 'sm_90a'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
KIND = re.compile(r"4KindINS0_\d+(?P<format>\w+?)ELi(?P<tokens>\d+)ELb(?P<glu>[01])ELb(?P<routed>[01])E")
ROW = "{:8} {:>6} {:>4} {:>7} {:>10} {:>7} {:>7} {:>6} {:>14}"


def compile_file(nvcc, source, folder):
    began = time.monotonic()
    command = [nvcc, "-c", *FLAGS, "-Xptxas", "-v", str(source), "-o", str(folder / f"{source.stem}.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{source}: {done.stderr.strip().splitlines()[-1]}")
    return time.monotonic() - began, done.stdout + done.stderr


def shapes(nvcc, kinds, folder):
    """Stages, spans and bytes of shared memory by kind, printed by a program that is compiled for it."""
    lines = "".join(
        f'    show("{f} {t} {g} {r}", Shape<Kind<{f}, {t}, {g}, {r}>>::kStages, Shape<Kind<{f}, {t}, {g}, {r}>>::kSpans, '
        f"Shape<Kind<{f}, {t}, {g}, {r}>>::kSmem);\n"
        for f, t, g, r in sorted(kinds)
    )
    source, program = folder / "shapes.cu", folder / "shapes"
    source.write_text(
        '#include "mm/mm.cuh"\n#include <cstdio>\nusing namespace frt::mm;\n'
        'static void show(const char * k, int a, int b, int c) { printf("%s %d %d %d\\n", k, a, b, c); }\n'
        f"int main() {{\n{lines}}}\n"
    )
    library = Path(nvcc).resolve().parents[1] / "lib64"
    subprocess.run([nvcc, *FLAGS, str(source), "-L", str(library), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {tuple(line.split()[:4]): line.split()[4:] for line in printed.splitlines()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("nvcc")
    parser.add_argument("-j", type=int, default=2)
    parser.add_argument("format", nargs="*")
    args = parser.parse_args()
    sources = sorted((ROOT / "csrc/mm").glob("mm_*.cu"))
    if args.format:
        sources = [s for s in sources if s.stem.removeprefix("mm_") in args.format]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.j) as pool:
        folder = Path(scratch)
        built = list(pool.map(lambda s: compile_file(args.nvcc, s, folder), sources))
        kernels = {}
        for _, log in built:
            for found in KERNEL.finditer(log):
                kind = KIND.search(found["name"])
                flags = ["true" if kind[k] == "1" else "false" for k in ("glu", "routed")]
                kernels[(kind["format"], kind["tokens"], *flags)] = found
        of = shapes(args.nvcc, kernels, folder)
        release = subprocess.run([args.nvcc, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
        print(f"{release}; {args.j} files at a time\n")
        print("seconds to compile: " + ", ".join(f"{s.stem} {t:.0f}" for s, (t, _) in zip(sources, built)) + "\n")
        print(ROW.format("format", "tokens", "glu", "routed", "registers", "spilled", "stages", "spans", "shared bytes"))
        for kind in sorted(kernels, key=lambda k: (k[0], int(k[1]), k[2:])):
            f = kernels[kind]
            spilled = int(f["stores"]) + int(f["loads"])
            print(ROW.format(kind[0], kind[1], kind[2][0], kind[3][0], f["registers"], spilled, *of[kind]))


main()

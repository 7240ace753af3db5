"""Run the forward under compute-sanitizer: memcheck, racecheck, initcheck; one line each.

    python bench/sanitize.py                        all three, some two minutes on an H200; exit 1 on any error
    python bench/sanitize.py --tool racecheck       one of them
    python bench/sanitize.py --output report.txt    keep what the tools printed

Small calls with ragged sizes in both dtypes, causal and not, over many head dims and views in memory; each result is
checked against float64 too. ``compute-sanitizer`` comes with a CUDA toolkit.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck")
_FOUND = 99  # the exit status that is asked for on errors
_SUMMARY = re.compile(r"^=+ ((?:\w+ SUMMARY: |No CUDA).*)$", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """A small call; `view` says how the arrays lie in memory."""

    dtype: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    view: str = "packed"
    batch: int = 1
    heads: int = 2
    heads_k: int = 2
    options: tuple[tuple[str, Any], ...] = ()


def calls(slow: bool) -> list[Call]:
    """The calls; fewer of them for a slow tool."""
    found = []
    dtypes = ("float16", "bfloat16")
    for number, head_dim in enumerate((40, 64, 80, 7, 128, 256)):
        found += [
            Call(dtypes[number % 2], 65, 130, head_dim, head_dim, False),
            Call(dtypes[1 - number % 2], 130, 77, head_dim, head_dim, True),
        ]
    found += [
        Call("float16", 33, 70, 64, 128, True, "fused"),
        Call("bfloat16", 100, 129, 192, 128, True, "reversed"),
        Call("float16", 70, 33, 128, 40, False, "bhsd", options=(("layout", "bhsd"),)),
        Call("bfloat16", 64, 64, 64, 64, False, "odd"),
        Call("float16", 1, 65, 64, 64, True, heads=4, heads_k=1),
        Call("bfloat16", 40, 50, 64, 64, True, options=(("out_dtype", "float32"), ("align", "top-left"))),
        Call("float16", 17, 19, 33, 65, True, options=(("softmax_scale", -0.2),)),
    ]
    if not slow:
        found += [
            Call(dtype, 200, 333, head_dim, head_dim, causal, "fused", 2, 4, 2)
            for dtype in dtypes
            for head_dim in (40, 64, 96, 128, 256)
            for causal in (False, True)
        ]
    return found


#: Options of calls, each at a head dimension of its own kind of tile.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"window": (20, 5)},
    {"softcap": 5.0},
    {"alibi": "bh"},
    {"bias": "bhqk"},
    {"bias": "hqk f32 holes", "bias_storage": "odd rows"},
    {"mask": "bhqk rows"},
    {"mask": "b11k"},
    {"sinks": True},
    {"seqlens_q": (70, 3), "seqlens_k": (0, 99), "causal": True},
    {"dropout_p": 0.3, "dropout_seed": 7},
    {
        **{"window": (60, 9), "softcap": 5.0, "alibi": "h", "bias": "b1qk f32", "mask": "11qk rows", "sinks": True},
        **{"seqlens_q": (70, 33), "seqlens_k": (99, 50), "dropout_p": 0.2, "dropout_seed": 9},
    },
)


def option_calls(slow: bool) -> list[Any]:
    """Calls with options; arrays lie among NaN."""
    from cupy_fa2.testing import Example

    head_dims = (64, 128, 256)
    return [
        Example("float16" if number % 2 else "bfloat16", 2, 70, 99, 2, 1, head_dim, head_dim, seed=number, **fields)
        for number, fields in enumerate(OPTIONS)
        for head_dim in ((head_dims[number % 3],) if slow else head_dims)
    ]


def arrays(call: Call, xp: Any) -> tuple[list[Any], list[Any]]:
    """The same q, k, v twice: on the device, each in an allocation that ends where its view does, and on the host."""
    import ml_dtypes

    dtype = np.dtype(np.float16 if call.dtype == "float16" else ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)

    def pair(seqlen: int, heads: int, dim: int) -> tuple[Any, Any]:
        x = rng.standard_normal((call.batch, seqlen, heads, dim)).astype(dtype)
        if call.view == "bhsd":
            x = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
        if call.view == "reversed":  # rows last to first
            return xp.asarray(np.ascontiguousarray(x[:, ::-1]))[:, ::-1], x
        if call.view == "fused":  # between two others of its size
            return xp.asarray(np.concatenate([x, x, x], axis=2))[:, :, heads : 2 * heads], x
        if call.view == "odd":  # from the second element on
            flat = xp.asarray(np.concatenate([x.reshape(-1)[:1], x.reshape(-1)]))
            return flat[1:].reshape(x.shape), x
        return xp.asarray(x), x

    pairs = [
        pair(call.seqlen_q, call.heads, call.head_dim),
        pair(call.seqlen_k, call.heads_k, call.head_dim),
        pair(call.seqlen_k, call.heads_k, call.head_dim_v),
    ]
    return [device for device, _ in pairs], [host for _, host in pairs]


def child(slow: bool) -> int:
    """Make the calls; what the tools watch."""
    import cupy

    cupy.cuda.set_allocator(None)  # no pool: the end of an array is the end of an allocation
    return check_all([*calls(slow), *option_calls(slow)], cupy)


def check_all(made: list[Any], xp: Any) -> int:
    """Make the calls on arrays of `xp` and check each against float64."""
    from cupy_fa2 import flash_attention
    from cupy_fa2.testing import assert_attention_close

    wrong = 0
    for call in made:
        if isinstance(call, Call):
            device, host = arrays(call, xp)
            options = {"causal": call.causal, **dict(call.options)}
            out, lse = flash_attention(*device, return_lse=True, **options)
            options.pop("out_dtype", None)
        else:
            device = host = call.arrays(xp)
            options = call.options
            out, lse = flash_attention(*device, return_lse=True, **(options | call.option_arrays(xp)))
        try:
            assert_attention_close(out, lse, *host, **options)
        except AssertionError as error:
            wrong += 1
            print(f"WRONG {call}: {str(error).strip().splitlines()[0]}")
    print(f"{len(made)} calls, {wrong} wrong")
    return 1 if wrong else 0


def run(tool: str, sanitizer: str, slow: bool) -> tuple[bool, str, str]:
    """One tool: whether all is well, its line, all that it printed."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND)]
    if tool == "racecheck":
        command += ["--racecheck-report", "all"]
    command += [sys.executable, __file__, "--child"] + (["--slow"] if slow else [])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    text = done.stdout + done.stderr
    summaries = _SUMMARY.findall(text)
    made = re.findall(r"^\d+ calls, \d+ wrong$", text, re.MULTILINE)
    clean = bool(summaries) and all(re.search(r"SUMMARY: 0 ", line) for line in summaries)
    well = done.returncode == 0 and clean and bool(made)
    if not well and not summaries:
        summaries = text.strip().splitlines()[-1:]
    line = f"{tool}: {'ok' if well else 'FAILED'}, {'; '.join(made + summaries)} ({seconds:.0f} s)"
    return well, line, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--sanitizer", help="path of compute-sanitizer, where it is not found")
    parser.add_argument("--output", type=Path, help="file for all that the tools print")
    parser.add_argument("--child", action="store_true", help="make the calls, under no tool")
    parser.add_argument("--slow", action="store_true", help="with --child: the short list, for slow tools")
    options = parser.parse_args()
    if options.child:
        return child(options.slow)
    sanitizer = options.sanitizer or shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if shutil.which(sanitizer) is None:
        print("compute-sanitizer was not found; it comes with a CUDA toolkit (--sanitizer PATH)", file=sys.stderr)
        return 2
    failed = 0
    kept = []
    for tool in options.tool:
        well, line, text = run(tool, sanitizer, slow=tool == "racecheck")
        failed += not well
        kept.append(f"== {tool}\n{text}")
        if not well:
            print("\n".join(text.splitlines()[:60]), file=sys.stderr)
        print(line, flush=True)
    if options.output:
        options.output.write_text("\n".join(kept))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

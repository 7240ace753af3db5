"""Small kernels that ask the C++ headers themselves, run in the simulator."""

from __future__ import annotations

import numpy as np

from cupy_fa2 import ptxsim
from cupy_fa2.compile import compile_source, gather_sources

OPTIONS = ("--std=c++20", "--device-as-default-execution-space", "--gpu-architecture=compute_80")


def run(body: str, *outputs: np.ndarray, inputs: tuple[np.ndarray, ...] = (), threads: int = 32) -> None:
    """Run a kernel whose body sees `out0`, `out1`, ... and `in0`, ..., pointers to int or float as the arrays are."""
    named = [(f"out{index}", x) for index, x in enumerate(outputs)]
    named += [(f"in{index}", x) for index, x in enumerate(inputs)]
    types = {np.dtype(np.int32): "int", np.dtype(np.float32): "float"}
    arguments = ", ".join(f"{'' if name[0] == 'o' else 'const '}{types[x.dtype]}* {name}" for name, x in named)
    unit = f'#include "sm80/fwd.cuh"\nusing namespace fa2;\nextern "C" __global__ void unit({arguments}) {{ {body} }}\n'
    ptx, _, _ = compile_source(unit, gather_sources(unit), "unit", OPTIONS)
    memory = ptxsim.GlobalMemory()
    addresses = [memory.bind(x, name, writable=name[0] == "o") for name, x in named]
    ptxsim.launch(
        ptxsim.parse_kernel(ptx, entry="unit"),
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        shared_bytes=0,
        params=[address.to_bytes(8, "little") for address in addresses],
        memory=memory,
    )

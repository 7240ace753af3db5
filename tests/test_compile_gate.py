"""The compile gate: every default kernel builds for every architecture, without spills.

Registers and spills are the assembler's, and differ from one NVRTC to the next, so an allowance names its version.
"""

from __future__ import annotations

import pytest

from cupy_fa2.compile import build, nvrtc_version
from cupy_fa2.device import NAMED_DEVICES
from cupy_fa2.plan import forward_spec

#: One card per architecture: 80, 86, 89, 90, 100, 120.
CARDS = [NAMED_DEVICES[name] for name in ("A100", "RTX 3090", "RTX 4090", "H200", "B200", "RTX 5090")]
DIMS = range(16, 257, 16)

#: Bytes of spill stores and loads per thread that a kernel may have, at most 16, by NVRTC version, head_dim and
#: architecture; anything not listed has none.
#: The reason is the same for all: O (128 registers) and S (64) of the 32 rows of a warp leave 63 for everything else,
#: and what goes to local memory is read once per key tile or less, outside the innermost loops.
ALLOWED_SPILLS: dict[tuple[int, int], dict[tuple[int, int], int]] = {}


def variants():
    """Every head dimension as the causal bf16 kernel, and every other policy at three of them."""
    specs = [(card, forward_spec(head_dim, head_dim, card, causal=True)[0]) for card in CARDS for head_dim in DIMS]
    for card in (CARDS[0], CARDS[3]):
        for head_dim in (64, 128, 256):
            specs += [
                (card, forward_spec(head_dim, head_dim, card, "f16")[0]),
                (card, forward_spec(head_dim, head_dim, card, "bf16")[0]),
                (card, forward_spec(head_dim, head_dim, card, "f16", causal=True)[0]),
                (card, forward_spec(head_dim, head_dim, card, "f16", causal=True, tensor_maps=False)[0]),
                (card, forward_spec(head_dim, head_dim, card, "f16", "float", causal=True)[0]),
                (card, forward_spec(head_dim, head_dim, card, "f16", negate=True)[0]),
                (card, forward_spec(head_dim, head_dim, card, "bf16", out_vectors=False)[0]),
            ]
        for head_dim, head_dim_v in ((192, 128), (64, 256), (256, 64)):
            specs.append((card, forward_spec(head_dim, head_dim_v, card, causal=True)[0]))
    return list(dict.fromkeys(specs))


@pytest.mark.parametrize(("card", "spec"), variants(), ids=lambda value: value.name)
def test_a_kernel_builds_without_spills(card, spec):
    binary = build(spec, card.target)
    tile = spec.tile
    allowed = ALLOWED_SPILLS.get(nvrtc_version(), {}).get((tile.head_dim, card.arch), 0)
    assert binary.registers > 0  # the assembler ran, and its report was understood
    assert 0 <= binary.spill_bytes <= allowed <= 16
    # Blocks of this size exist only if their registers do: 65,536 per multiprocessor.
    assert -(-binary.registers // 8) * 8 * tile.threads <= 65536

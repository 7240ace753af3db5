"""The compile gate: every default kernel builds for every architecture, without spills.

Registers and spills are the assembler's, and differ from one NVRTC to the next, so an allowance names its version.
"""

from __future__ import annotations

import pytest
import sass
from sampling import sampled_rows

from cupy_fa2.compile import build, nvrtc_version
from cupy_fa2.device import NAMED_DEVICES
from cupy_fa2.kernel.base import target
from cupy_fa2.kernel.features import Features
from cupy_fa2.plan import forward_spec
from cupy_fa2.problem import Options, Problem, Structure
from cupy_fa2.testing import OPTION_EXAMPLES, Example, with_options

#: One card per architecture: 80, 86, 89, 90, 100, 120.
CARDS = [NAMED_DEVICES[name] for name in ("A100", "RTX 3090", "RTX 4090", "H200", "B200", "RTX 5090")]
DIMS = range(16, 257, 16)

#: (NVRTC version, spec's name, architecture) -> (bytes of spill stores and loads per thread, at most 16; the reason).
#: Anything not listed has none.
ALLOWED_SPILLS: dict[tuple[tuple[int, int], str, int], tuple[int, str]] = {
    **{
        (version, "fwd_bf16_d128_128x48_w4_s1_window", 80): (8, "O and S take 176 registers; none in the main loop")
        for version in ((12, 9), (13, 0), (13, 5))
    },
    **{
        (version, "fwd_bf16_d256_128x64_w8_s2_bywarp_team2_tensor_bias_bf16", 90): (
            16,
            "O, S and the bias take 192 registers",
        )
        for version in ((12, 9), (13, 0), (13, 5))
    },
    ((13, 5), "fwd_bf16_d128_128x48_w4_s2_bywarp_tensor_alibi", 90): (12, "slopes and distances beside O and S"),
    **{
        ((13, 5), f"fwd_{kind}", 90): (
            8,
            "O and S take 176 to 192 registers; stored before the loop, read once after it",
        )
        for kind in (
            "f16_d128_128x48_w4_s2_tensor",
            "bf16_d128_128x48_w4_s2_tensor",
            "bf16_d128_128x48_w4_s2_tensor_elements",
            "f16_d128_128x64_w4_s1_causal",
        )
    },
}


def features(*options):
    """What a bf16 call with these options asks of its kernel."""
    example = with_options(Example("bfloat16", 2, 140, 150, 1, 1, 64, 64), *options)
    return Problem.from_arrays(*example.arrays(), Options(**example.options), addresses=(0, 0, 0, 0)).features


#: Of each option alone, and of all of them: with a softcap below 1, so that what is added can be divided by the unit.
OPTIONS = [
    *(features(fields) for fields in OPTION_EXAMPLES.values()),
    features(*OPTION_EXAMPLES.values(), {"softcap": 0.5}),
]
CAUSAL, NEGATE = Features(band="causal"), Features(negate=True)


def spec_of(card, head_dim, head_dim_v=None, **fields):
    """The kernel that a call gets."""
    return forward_spec(Structure.typical(head_dim, head_dim_v, **fields), card)[0]


def variants():
    """Every head dimension as the causal bf16 kernel, and every other policy at three of them."""
    specs = [(card, spec_of(card, head_dim, features=CAUSAL)) for card in CARDS for head_dim in DIMS]
    for card in (CARDS[0], CARDS[3]):
        for head_dim in (64, 128, 256):
            specs += [
                (card, spec_of(card, head_dim, dtype="f16")),
                (card, spec_of(card, head_dim)),
                (card, spec_of(card, head_dim, dtype="f16", features=CAUSAL)),
                (card, spec_of(card, head_dim, dtype="f16", features=CAUSAL, tensor_maps=False)),
                (card, spec_of(card, head_dim, dtype="f16", out_dtype="float", features=CAUSAL)),
                (card, spec_of(card, head_dim, dtype="f16", features=NEGATE)),
                (card, spec_of(card, head_dim, out_vectors=False)),
            ]
            specs += [(card, spec_of(card, head_dim, features=asked)) for asked in OPTIONS]
        for head_dim, head_dim_v in ((192, 128), (64, 256), (256, 64)):
            specs.append((card, spec_of(card, head_dim, head_dim_v, features=CAUSAL)))
    return list(dict.fromkeys(specs))


#: By default: bf16 with no options and causal, at three head dimensions.
DEFAULTS = [
    (card, spec_of(card, head_dim, features=asked))
    for card in (CARDS[0], CARDS[3])
    for head_dim in (64, 128, 256)
    for asked in (Features(), CAUSAL)
]


@pytest.mark.parametrize(("card", "spec"), sampled_rows(variants(), *DEFAULTS), ids=lambda value: value.name)
def test_a_kernel_builds_without_spills(card, spec):
    binary = build(spec, target(spec, card))
    tile = spec.tile
    allowed, _ = ALLOWED_SPILLS.get((nvrtc_version(), spec.name, card.arch), (0, ""))
    assert binary.registers > 0  # the assembler ran, and its report was understood
    assert 0 <= binary.spill_bytes <= allowed <= 16
    # Blocks of this size exist only if their registers do: 65,536 per multiprocessor.
    assert -(-binary.registers // 8) * 8 * tile.threads <= 65536


#: Instructions per key tile that every pass of the main loop executes, with NVRTC 12.9, by (card, head_dim, causal):
#: mma, ldmatrix, MUFU (the exponentials), integer, and all together. A kernel that needs more is slower: measure it
#: before changing a number here.
MAIN_LOOP = {
    ("H200", 64, False): (256, 72, 128, 32, 970),
    ("H200", 64, True): (256, 72, 128, 32, 970),
    ("H200", 128, False): (192, 64, 48, 32, 538),
    ("H200", 128, True): (256, 80, 64, 32, 695),
    ("H200", 256, False): (256, 94, 32, 45, 590),
    ("H200", 256, True): (256, 94, 32, 45, 592),
    ("A100", 64, False): (128, 40, 64, 20, 503),
    ("A100", 64, True): (128, 40, 64, 20, 503),
    ("A100", 128, False): (256, 80, 64, 54, 730),
    ("A100", 128, True): (192, 64, 48, 46, 568),
    ("A100", 256, False): (256, 144, 32, 53, 634),
    ("A100", 256, True): (256, 144, 32, 53, 634),
}


@pytest.mark.skipif(sass.find_tool() is None, reason="no disassembler: pip install nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(
    ("card", "head_dim", "causal"),
    sampled_rows(MAIN_LOOP, ("H200", 64, True), ("H200", 128, False), ("H200", 256, True), ("A100", 128, True)),
)
def test_the_main_loop_does_not_grow(card, head_dim, causal):
    device = NAMED_DEVICES[card]
    spec = spec_of(device, head_dim, features=Features(band="causal" if causal else "full"))
    counts = sass.main_loop_counts(build(spec, target(spec, device)).cubin, spec.tile, always=True)
    mma, ldmatrix, mufu, integer, total = MAIN_LOOP[card, head_dim, causal]
    slack = 1.02 if nvrtc_version() == (12, 9) else 1.15  # another assembler schedules and addresses differently
    assert counts["mma"] == mma
    assert counts["ldmatrix"] == ldmatrix
    assert counts["mufu"] == mufu
    assert counts["local"] == 0
    assert counts["integer"] <= integer * slack + 3
    assert counts["total"] <= total * slack + 3

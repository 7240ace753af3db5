"""`SoftmaxState::merge`, asked of the C++ itself in the simulator: attention over split keys, against all of them."""

from __future__ import annotations

import numpy as np
import pytest
from cpp_tools import run

ROWS, COLS, KEYS = 16, 16, 40
LOG2_E = 1.4426950408889634


def merged(scale: float, *states):
    """Merge (O, rows of reference, sum, weight) one after the other; O, those rows, and result()'s three."""
    o, rows, result = (np.zeros(shape, np.float32) for shape in ((ROWS, COLS), (3, ROWS), (3, ROWS)))
    flat = [x for state in states for x in state]
    text = f"""using State = SoftmaxState<1, {COLS}>;
        const auto load = [](const float* o, const float* rows) {{
          State state;
          state.scale = {float(scale)!r}f;
          for (int n = 0; n < {COLS // 8}; ++n)
            for (int i = 0; i < 4; ++i)
              state.o.c[0][n][i] = o[fragment_row(i / 2) * {COLS} + n * 8 + fragment_col() + i % 2];
          for (int r = 0; r < 2; ++r) {{
            state.reference[r] = rows[fragment_row(r)];
            state.log2_reference[r] = ptx::max(state.reference[r] * state.scale, kLowest);
            state.sum[r] = rows[{ROWS} + fragment_row(r)];
            state.weight[r] = rows[{2 * ROWS} + fragment_row(r)];
          }}
          return state;
        }};
        State state = load(in0, in1);
        {"".join(f"state.merge(load(in{i}, in{i + 1}));" for i in range(2, len(flat), 2))}
        for (int n = 0; n < {COLS // 8}; ++n)
          for (int i = 0; i < 4; ++i)
            out0[fragment_row(i / 2) * {COLS} + n * 8 + fragment_col() + i % 2] = state.o.c[0][n][i];
        if (lane_id() % 4 == 0)
          for (int r = 0; r < 2; ++r) {{
            const State::Result result = state.result(r);
            const float rows[] = {{state.reference[r], state.sum[r], state.weight[r]}};
            const float results[] = {{result.empty ? 1.f : 0.f, result.factor, result.log2_sum_of_exp2}};
            for (int i = 0; i < 3; ++i) {{
              out1[i * {ROWS} + fragment_row(r)] = rows[i];
              out2[i * {ROWS} + fragment_row(r)] = results[i];
            }}
          }}"""
    run(text, o, rows, result, inputs=tuple(np.ascontiguousarray(x, np.float32) for x in flat))
    return o, rows, result


def state_of(scores, values, scale: float, lag):
    """What a loop over these keys leaves in float64, with references that lag behind the maxima by `lag`."""
    visible = (scores > -np.inf).any(1)
    reference = np.where(visible, scores.max(1, initial=-np.inf) - lag, -np.inf)
    with np.errstate(invalid="ignore"):
        p = np.where(scores > -np.inf, np.exp2((scores - reference[:, None]) * scale), 0.0)
    return p @ values, np.stack([reference, p.sum(1), p.sum(1)])


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("scale", [0.7, 1e-3, 40.0])
def test_split_keys_merge_to_all_keys(scale, parts):
    rng = np.random.default_rng(parts)
    scores = rng.standard_normal((ROWS, KEYS)) * 3
    values = rng.standard_normal((KEYS, COLS))
    scores[3, :13] = scores[4, 13:] = scores[5] = -np.inf  # one part that saw nothing, another one, all
    splits = np.split(np.arange(KEYS), (13, 27)[: parts - 1])
    lag = rng.uniform(0, 8 / scale, ROWS)
    states = [state_of(scores[:, part], values[part], scale, lag * (i % 2)) for i, part in enumerate(splits)]
    o, rows, (empty, factor, log2) = merged(scale, *states)

    whole_o, (reference, total, _) = state_of(scores, values, scale, 0)
    seen = np.arange(ROWS) != 5
    assert (empty == ~seen).all()
    np.testing.assert_allclose(o[seen] * factor[seen, None], whole_o[seen] / total[seen, None], atol=1e-5)
    np.testing.assert_allclose(log2[seen], reference[seen] * scale + np.log2(total[seen]), rtol=1e-5, atol=1e-5)
    assert log2[5] == -np.inf
    assert (rows[1] == rows[2]).all()  # sum and weight were alike, and are
    if parts == 2:  # whichever takes in the other
        for a, b in zip(merged(scale, *states[::-1]), (o, rows, np.stack([empty, factor, log2])), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_results_are_states():
    """(out, lse) of split keys, which is how a kernel leaves them."""
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((ROWS, KEYS)) * 5, rng.standard_normal((KEYS, COLS))
    scores[2, :20] = -np.inf

    def attention(part):
        o, (reference, total, _) = state_of(scores[:, part], values[part], LOG2_E, 0)
        seen = total > 0
        lse = np.where(seen, reference + np.log(total, where=seen, out=np.zeros(ROWS)), -np.inf)
        return o / np.where(seen, total, 1)[:, None], np.stack([lse, seen, seen])

    o, _, (_, factor, log2) = merged(LOG2_E, attention(np.arange(20)), attention(np.arange(20, KEYS)))
    out, (lse, _, _) = attention(np.arange(KEYS))
    np.testing.assert_allclose(o * factor[:, None], out, atol=1e-5)
    np.testing.assert_allclose(log2 / LOG2_E, lse, rtol=1e-5)


def test_large_scores_nan_and_nothing():
    """Four rows each: references whose multiples float32 rounds by more than 1; NaN; nothing, NaN in O; nothing."""
    scale, values = 1e6, np.ones((ROWS, COLS))
    a = np.array([[1000.0, 0.5, -np.inf, -np.inf], [1, np.nan, 0, 0], [1, np.nan, 0, 0]]).repeat(4, 1)
    b = np.array([[1000.0 - 2**-13, 0.5, 7.0, -np.inf], [1, 2, 3, 0], [1, 2, 3, 0]]).repeat(4, 1)
    o_a, o_b = values * 1, values * 3
    o_a[8:12] = np.nan  # 0 x NaN of a masked value
    o_b[12:] = np.nan
    o, rows, (empty, _, log2) = merged(scale, (o_a, a), (o_b, b))
    small = np.exp2(-(2.0**-13) * scale)
    np.testing.assert_allclose(o[:4], 1 + 3 * small)
    np.testing.assert_allclose(rows[1, :4], 1 + small)
    assert np.isnan(log2[4:8]).all()
    assert (o[8:12] == 3).all()
    assert (rows[:, 8:12] == [[7], [3], [3]]).all()
    assert (empty == [0] * 12 + [1] * 4).all()
    assert (o[12:] == 0).all()

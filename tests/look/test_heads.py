"""Statistics, removal, the logit lens: against loops over single numbers, and models whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from brickformer import GLU, Attention, Decoder, DecoderModel, Encoder, Head, Layer, Mask, Rope, pattern
from brickformer.errors import DataError
from brickformer.look import attention
from brickformer.look import view as view_module
from brickformer.look.ablate import distance_from
from brickformer.look.lens import lens
from brickformer.look.stats import NAMES, alike, dead, means, row_stats
from brickformer.look.table import findings
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2

TEXT = [3, 1, 4, 1, 5, 3, 1]


def by_hand(row: list[float], q: int, n: int, ids: list[int], *, cross: bool) -> dict[str, float]:
    """One row of a map over keys 0, 1, ..."""
    nan = math.nan
    same = [a for j, a in enumerate(row) if ids[j] == ids[q] and (cross or j != q)]
    mirrored = n - 1 - q
    return {
        "entropy": -sum(a * math.log(a) for a in row if a > 0),
        "distance": sum(a * abs(q - j) for j, a in enumerate(row)),
        "first": row[0] if q > 0 or cross else nan,
        "previous": row[q - 1] if q > 0 else nan,
        "same_token": sum(same) if same else nan,
        "diagonal": row[q],
        "anti": row[mirrored],
    }


@pytest.mark.parametrize("cross", [False, True])
def test_statistics_are_the_sums_they_say(cross: bool) -> None:
    weights = torch.rand(2, 7, 7).softmax(-1)
    found = row_stats(weights, torch.arange(7), torch.arange(7), keys=7, q_ids=TEXT, k_ids=TEXT, cross=cross)
    for h in range(2):
        for q in range(7):
            expected = by_hand(weights[h, q].tolist(), q, 7, TEXT, cross=cross)
            got = dict(zip(NAMES, found[h, q].tolist(), strict=True))
            assert got == pytest.approx(expected, rel=1e-5, nan_ok=True), (h, q)


def test_what_no_row_can_have_is_no_number() -> None:
    weights = torch.ones(1, 1, 1)
    (head,) = means(row_stats(weights, torch.tensor([0]), torch.tensor([0]), keys=1))
    assert math.isnan(head.previous) and math.isnan(head.same_token) and head.diagonal == 1.0 and head.entropy == 0.0


def test_causal_rows_whose_mirrored_place_lies_ahead_do_not_count() -> None:
    weights = torch.zeros(1, 4, 4)
    weights[0, 0, 0] = weights[0, 1, 1] = weights[0, 2, 1] = weights[0, 3, 0] = 1.0
    (head,) = means(row_stats(weights, torch.arange(4), torch.arange(4), keys=4))
    assert head.anti == 1.0


def test_heads_that_look_at_the_same() -> None:
    a, b = torch.rand(6, 6).tril(), torch.rand(6, 6).tril()
    maps = torch.stack([a, b, a + 0.01 * torch.rand(6, 6).tril()])
    maps = maps / maps.sum(-1, keepdim=True)
    assert alike(maps) == [(0, 2)]
    assert alike(torch.ones(2, 1, 1)) == [], "a single key is looked at by everyone"


def test_dead_is_said_beside_the_strongest() -> None:
    assert dead([1.0, 1e-5, math.nan, 0.1]) == [1]


def model(*, heads: int = 3) -> DecoderModel:
    made = Decoder(11, 24, pattern([Layer(Attention(heads=heads, position=Rope()), GLU(16))], 2), head=Head(tied=False))
    return made.build().eval()


def shaken(m: DecoderModel) -> DecoderModel:
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return m


def test_removal_is_a_zero_where_the_head_enters_its_projection() -> None:
    m = shaken(model())
    view = attention(m, TEXT)
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        before = m(ids).double().log_softmax(-1)
        for layer in range(2):
            for head in range(3):
                out = m.stack.layers[layer].mixer.out.weight
                kept = out[:, 8 * head : 8 * head + 8].clone()
                out[:, 8 * head : 8 * head + 8] = 0.0
                after = m(ids).double().log_softmax(-1)
                out[:, 8 * head : 8 * head + 8] = kept
                expected = (before.exp() * (before - after)).sum(-1).mean()
                assert view.maps[layer].stats[head].removed == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("named", ["stack.layers.1:1,3", "1:1,3", "1.mixer:1,3"])
def test_of_some_heads_those_are_removed(named: str) -> None:
    """By the path of the module, or as the table names it."""
    m = shaken(model())
    whole, some = attention(m, TEXT), attention(m, TEXT, only=[named])
    assert [m.name for m in some.maps] == ["stack.layers.1.mixer"]
    assert [s.removed for s in some.maps[0].stats] == [whole.maps[1].stats[h].removed for h in (0, 2)]


def test_a_head_without_a_way_out_is_dead() -> None:
    m = shaken(model())
    with torch.no_grad():
        m.stack.layers[1].mixer.out.weight[:, 8:16] = 0.0
    view = attention(m, TEXT)
    assert view.dead == [(1, 1)] and view.marked() == (view.dead, True)


def test_of_many_dead_heads_the_others_are_marked() -> None:
    m = shaken(model())
    with torch.no_grad():
        m.stack.layers[0].mixer.out.weight.zero_()
        m.stack.layers[1].mixer.out.weight[:, 8:16] = 0.0
    view = attention(m, TEXT)
    assert view.dead == [(0, 0), (0, 1), (0, 2), (1, 1)] and view.marked() == ([(1, 0), (1, 2)], False)
    assert findings(view)[:2] == [
        "removed alone, all heads but these change next to nothing (others may do the same work):",
        "  1.mixer 1, 3",
    ]


def test_a_mixer_without_heads_is_removed_whole() -> None:
    m = shaken(Decoder(11, 24, (Layer(Mamba(state=4)), Layer(Attention(heads=2)))).build().eval())
    ids = torch.tensor([TEXT])
    found = attention(m, TEXT).maps[0].stats[0].removed
    with torch.no_grad():
        before = m(ids).double().log_softmax(-1)
        m.stack.layers[0].mixer.out.weight.zero_()
        after = m(ids).double().log_softmax(-1)
    assert found == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-3)


@pytest.mark.parametrize("mixer", [Mamba2(state=4, heads=3), GatedDelta(heads=3)], ids=["mamba2", "delta"])
def test_heads_that_are_removed_together_have_one_number_and_cost_one_pass(
    mixer: Mamba2 | GatedDelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = shaken(Decoder(11, 24, (Layer(mixer), Layer(Attention(heads=2)))).build().eval())
    monkeypatch.setattr(view_module, "REMOVALS", 3)  # one for the mixer, two for the heads of attention
    whole, heads = attention(m, TEXT).maps
    found = [s.removed for s in whole.stats]
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        before = m(ids).double().log_softmax(-1)
        m.stack.layers[0].mixer.out.weight.zero_()
        after = m(ids).double().log_softmax(-1)
    expected = float((before.exp() * (before - after)).sum(-1).mean())
    assert len(found) == 3 and found == pytest.approx([expected] * 3, rel=1e-3)
    assert all(s.removed > 0 for s in heads.stats)


def test_vectors_are_compared_by_length() -> None:
    a = torch.randn(1, 3, 4)
    assert distance_from(a, logits=False)(1.5 * a) == pytest.approx(0.5, rel=1e-6)
    assert distance_from(a, logits=True)(a + 7.0) == pytest.approx(0.0, abs=1e-12), "logits have no zero"


def test_the_lens_is_the_model_cut_off_after_each_layer() -> None:
    m = shaken(model())
    ids = torch.tensor([TEXT])
    found = lens(m, lambda: m(ids), best=11)
    assert [layer.name for layer in found] == ["embed", "stack.layers.0", "stack.layers.1"]
    with torch.no_grad():
        full = m(ids)[0].log_softmax(-1)
        for depth, layer in enumerate(found):
            short = model()
            short.load_state_dict(m.state_dict())
            short.stack.layers = torch.nn.ModuleList(list(m.stack.layers)[:depth])
            expected = short(ids)[0].softmax(-1)
            got = torch.zeros_like(expected).scatter(1, torch.tensor(layer.ids), torch.tensor(layer.p))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            kl = (full.exp() * (full - expected.log())).sum(-1)
            torch.testing.assert_close(torch.tensor(layer.kl), kl.clamp_min(0.0), rtol=1e-3, atol=1e-5)


def test_the_lens_shows_the_rows_it_is_asked_for() -> None:
    m = shaken(model())
    every, some = (lens(m, lambda: m(torch.tensor([TEXT])), rows) for rows in (None, (2, 5)))
    assert [layer.ids for layer in some] == [layer.ids[2:5] for layer in every]


def test_an_encoder_without_a_head_has_no_answers() -> None:
    m = Encoder(11, 24, (Layer(Attention(heads=2, mask=Mask(causal=False)), GLU(16)),)).build()
    with pytest.raises(DataError, match="no head"):
        lens(m, lambda: None)
    view = attention(m, TEXT)
    assert not view.layers and not view.logits and view.maps[0].stats[0].removed > 0


def test_replayed_steps_are_the_models_own_probabilities() -> None:
    from brickformer.look.view import replay

    m, answer = shaken(model()), [2, 7, 1, 8]
    steps = replay(m, TEXT, answer, None)
    with torch.no_grad():
        p: Tensor = m(torch.tensor([TEXT + answer]))[0].softmax(-1)
    for i, step in enumerate(steps):
        row = p[len(TEXT) - 1 + i]
        assert step.p == pytest.approx(float(row[answer[i]]), rel=1e-4)
        assert [t for t, _ in step.top] == row.topk(5).indices.tolist()
        assert step.length == len(TEXT) + i, "the newest token is not yet in the cache"

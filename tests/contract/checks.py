"""The contract as plain functions: check(model) returns nothing, or raises an AssertionError that says what broke.

A check takes any model whose parameters are in float64 and in eval mode (`bricks.Cell.build` makes them), knows nothing
of bricks beyond the slots' interfaces, and leaves the model as it found it. Which families a check is for stands in
`CHECKS`. Mutants (tests/mutants) run the very same functions on a broken copy of the package.

Shapes: B rows, T tokens, S source tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from brickformer.attend import Attend
from brickformer.errors import StateError
from brickformer.layers import Stack
from brickformer.linear import FusedLinear
from brickformer.mask import Span
from brickformer.mixers.attention import AttentionMixer
from brickformer.mixers.cross import Memory
from brickformer.mixers.delta import GatedDeltaMixer
from brickformer.mixers.pointwise import Pointwise
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel
from brickformer.moe import Routing, TopKRouter
from brickformer.positions import RandomPlaces
from brickformer.state import KV, StackState

ROWS, TOKENS, SOURCE = 2, 10, 7
TOLERANCE = 1e-9  # float64: one part in a thousand million, absolute and relative
HUGE = 1e5


# ---- one way to talk to three families ------------------------------------------------------------------------------


def side_of(model: AnyModel) -> DecoderModel | EncoderModel:
    """The model that reads the sequence under test: the decoder of an encoder-decoder."""
    return model.decoder if isinstance(model, EncoderDecoderModel) else model


def stack_of(model: AnyModel) -> Stack:
    """Its layers."""
    return side_of(model).stack


def draw(model: AnyModel, rows: int = ROWS, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    """Random ids, (rows, tokens); the rows of a smaller batch are the first rows of a larger one."""
    drawn = torch.randint(0, side_of(model).spec.vocab, (8, 64), generator=torch.Generator().manual_seed(seed))
    return drawn[:rows, :tokens].contiguous()


def memory_of(model: AnyModel, rows: int = ROWS) -> Memory | None:
    """The memory of a fixed source whose rows differ in length; None for models without one."""
    if not isinstance(model, EncoderDecoderModel):
        return None
    src = torch.randint(0, model.spec.encoder.vocab, (8, SOURCE), generator=torch.Generator().manual_seed(5))
    valid = torch.ones(8, SOURCE, dtype=torch.bool)
    valid[1::2, -2:] = False
    return model.encode(src[:rows], valid[:rows])


def say(
    model: AnyModel,
    ids: Tensor,
    at: Span | None = None,
    state: StackState | None = None,
    memory: Memory | None = None,
) -> Tensor:
    """The logits (vectors, for an encoder without a head), by the model's own call."""
    match model:
        case DecoderModel():
            return model(ids, at, state)
        case EncoderDecoderModel():
            return model.decode(ids, memory, at, state)
        case EncoderModel():
            if at is None:
                h = model(ids)
            else:
                at = model.embed.place(at)
                h = model.stack(model.embed(ids, at), at)
            return h if model.head is None else model.logits(h)


def say_vectors(model: AnyModel, x: Tensor, memory: Memory | None = None, at: Span | None = None) -> Tensor:
    """The same for tokens that are embedded already, (B, T, D)."""
    side = side_of(model)
    h = side.stack(x, side.embed.place(at or Span(0, x.shape[1])), None, memory)
    return h if side.head is None else side.head(h)


def vectors(model: AnyModel, ids: Tensor, at: Span | None = None) -> Tensor:
    """Embedded tokens, cut from the graph."""
    embed = side_of(model).embed
    return embed(ids, embed.place(at or Span(0, ids.shape[1]))).detach()


def close(got: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Equal up to the tolerance, and finite."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert bool(got.isfinite().all()), f"{what}: not finite"
    wrong = (got - expected).abs() / expected.abs().clamp_min(1.0)
    assert wrong.numel() == 0 or wrong.max().item() <= tolerance, f"{what}: differs by {wrong.max().item():.3g}"


# ---- what sees what -------------------------------------------------------------------------------------------------


def reach(model: AnyModel) -> tuple[float, float]:
    """How many tokens back and forward an output may depend on: windows add up over layers."""
    spec = side_of(model).spec
    back = forward = 0.0
    for layer, mixer in list(zip(spec.layers, stack_of(model).mixers(), strict=True)) * spec.loops:
        own = layer.mixer
        if isinstance(own, ShortConv):
            back, own = back + own.kernel - 1, own.mixer
        mask = getattr(own, "mask", None)
        step = math.inf if mask is None or mask.window is None else mask.window - 1
        if isinstance(own, Pointwise):
            step = 0
        back += step
        forward += 0 if mixer.causal else step
    return back, forward


def may_see(model: AnyModel) -> Tensor:
    """(T, T): True where output t may depend on input s."""
    back, forward = reach(model)
    apart = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]  # t - s
    return (apart <= back) & (-apart <= forward)


def dependence(model: AnyModel, seed: int = 0) -> Tensor:
    """(T, T): the largest |∂ output t / ∂ embedding s|. Row t of a batch of T equal rows asks about output t."""
    x = vectors(model, draw(model, 1, seed=seed)).expand(TOKENS, -1, -1).clone().requires_grad_()
    memory = memory_of(model, 1)
    if memory is not None:
        memory = Memory(memory.value.expand(TOKENS, -1, -1), memory.at)
    out = say_vectors(model, x, memory)
    (grad,) = torch.autograd.grad(_mixed(out[range(TOKENS), range(TOKENS)]), x)
    return grad.abs().amax(-1)


def _mixed(out: Tensor) -> Tensor:
    """One number that depends on every output by its own amount (a plain sum is blind after a norm)."""
    weight = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return (out * weight.to(out.dtype)).sum()


def causal_by_gradient(model: AnyModel) -> None:
    """∂ output[t] / ∂ embedding[s] is exactly zero for every s > t."""
    leak = dependence(model).triu(1)
    t, s = divmod(int(leak.argmax()), TOKENS)
    assert leak.max() == 0.0, f"output {t} depends on token {s}, {s - t} later: gradient {leak.max().item():.3g}"


@torch.no_grad()
def causal_by_perturbation(model: AnyModel) -> None:
    """Tokens after t replaced by huge ones: outputs up to t stay as they are."""
    x = vectors(model, draw(model, 1))
    far = torch.randn(TOKENS, *x.shape[1:], dtype=x.dtype) * HUGE
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[..., None]
    memory = memory_of(model, 1)
    calm = say_vectors(model, x, memory)
    if memory is not None:
        memory = Memory(memory.value.expand(TOKENS, -1, -1), memory.at)
    shaken = say_vectors(model, torch.where(later, far, x), memory)
    for t in range(TOKENS):
        close(shaken[t, : t + 1], calm[0, : t + 1], f"outputs up to {t} after a change of later tokens")


def reads_exactly_its_window(model: AnyModel) -> None:
    """The gradient is zero outside the window of all layers together and nowhere zero inside."""
    allowed, seen = may_see(model), dependence(model)
    if ((seen == 0) & allowed).any():  # a ReLU is flat for some tokens: blind is what no draw sees through
        seen = torch.maximum(seen, dependence(model, seed=1))
    extra, missing = (seen > 0) & ~allowed, (seen == 0) & allowed
    assert not extra.any(), f"outputs depend on tokens they may not see (output, token): {extra.nonzero().tolist()}"
    assert not missing.any(), f"outputs are blind to tokens they may see (output, token): {missing.nonzero().tolist()}"


@torch.no_grad()
def blind_beyond_its_window(model: AnyModel) -> None:
    """Tokens out of reach replaced by huge ones: the output stays as it is."""
    x = vectors(model, draw(model, 1))
    outside = ~may_see(model)
    far = torch.randn(TOKENS, *x.shape[1:], dtype=x.dtype) * HUGE
    memory = memory_of(model, 1)
    calm = say_vectors(model, x, memory)[0]
    if memory is not None:
        memory = Memory(memory.value.expand(TOKENS, -1, -1), memory.at)
    shaken = say_vectors(model, torch.where(outside[..., None], far, x), memory)
    close(shaken[range(TOKENS), range(TOKENS)], calm, "outputs after a change of tokens out of reach")


def reads_every_source_token(model: EncoderDecoderModel) -> None:
    """Every target output depends on every real source token and on no padding; another source, another answer."""
    src = draw(model, 1, SOURCE, seed=3).expand(2, -1)
    valid = torch.ones(2, SOURCE, dtype=torch.bool)
    valid[1, :2] = False
    at = model.encoder.embed.place(Span.of(src, valid=valid))
    x = model.encoder.embed(src, at).detach().requires_grad_()
    memory = Memory(model.encoder.stack(x, at), at)
    out = model.decode(draw(model), memory)
    back, forward = reach(model)
    for t in (0, TOKENS - 1):
        (grad,) = torch.autograd.grad(_mixed(out[:, t]), x, retain_graph=True, allow_unused=True)
        assert grad is not None, "the source is not read at all"
        seen = grad.abs().amax(-1) > 0
        assert torch.equal(seen, valid), (
            f"target {t} depends on source tokens {seen.tolist()}, real are {valid.tolist()}"
        )


@torch.no_grad()
def order_matters(model: EncoderModel) -> None:
    """Swapping two tokens swaps two outputs and changes nothing else if, and only if, no brick knows positions."""
    spec = model.spec
    blind = spec.embed.position is None and all(_is_order_blind(layer.mixer) for layer in spec.layers)
    order = list(range(TOKENS))
    order[2], order[7] = order[7], order[2]
    ids = draw(model)
    straight, swapped = say(model, ids)[:, order], say(model, ids[:, order])
    wrong = (straight - swapped).abs().max().item()
    if blind:
        assert wrong <= TOLERANCE, f"no brick knows positions, yet the order of tokens changed an output by {wrong:.3g}"
    else:
        assert wrong > 1e-6, "the order of the tokens changes nothing: positions are not used"


def _is_order_blind(mixer: object) -> bool:
    mask = getattr(mixer, "mask", None)
    plain = mask is not None and not mask.causal and mask.window is None
    return plain and getattr(mixer, "position", None) is None


@torch.no_grad()
def relative_positions_are_relative(model: AnyModel) -> None:
    """A run of tokens moved along by 5 positions: nothing changes if, and only if, there is no absolute position."""
    ids, memory = draw(model), memory_of(model)
    here, there = say(model, ids, Span(0, TOKENS), memory=memory), say(model, ids, Span(5, TOKENS), memory=memory)
    if side_of(model).spec.embed.position is None:
        close(there, here, "the same tokens five positions further")
    else:
        assert (here - there).abs().max() > 1e-6, "an absolute position that does not tell position 0 from position 5"


# ---- memory between calls -------------------------------------------------------------------------------------------

CHUNKS = ([1] * 10, [10], [4, *[1] * 6], [1, 5, 1, 3], [2, 8])


@torch.no_grad()
def cached_equals_full(model: AnyModel) -> None:
    """Decoding token by token, prefill, chunks and any mixture of them say at every step what one full call says."""
    ids, memory = draw(model), memory_of(model)
    whole = say(model, ids, memory=memory)
    for chunks in CHUNKS:
        state = model.init_state(ROWS, TOKENS)
        feed(model, ids, state, chunks, memory, whole, f"chunks {chunks}")


def feed(
    model: AnyModel,
    ids: Tensor,
    state: StackState,
    chunks: list[int],
    memory: Memory | None,
    whole: Tensor,
    what: str,
) -> None:
    """Feed ids in chunks on top of the state; every answer must be what `whole` says there."""
    begin = 0
    for size in chunks:
        length = state.length
        try:
            got = say(model, ids[:, begin : begin + size], state=state, memory=memory if length == 0 else None)
        except StateError as refused:
            raise AssertionError(f"{what}: tokens {begin} to {begin + size - 1} are refused: {refused}") from refused
        close(got, whole[:, begin : begin + size], f"{what}: tokens {begin} to {begin + size - 1}")
        assert state.length == length + size, f"{what}: the clock says {state.length}, expected {length + size}"
        begin += size
    assert begin == ids.shape[1], "the check itself is wrong: chunks do not add up"


PADDED_PROMPTS = {
    "no padding": [1, 1, 1, 1, 1, 1],
    "left": [0, 0, 0, 1, 1, 1],
    "right": [1, 1, 1, 0, 0, 0],
    "middle": [1, 1, 0, 0, 0, 1],
    "both": [0, 1, 1, 1, 0, 0],
}


@torch.no_grad()
def padded_prompt_then_decode(model: AnyModel) -> None:
    """Prompts of different lengths in one batch, padded on any side, go on as each of them would alone."""
    rows, prompt = len(PADDED_PROMPTS), 6
    ids, memory, valid = draw(model, rows), memory_of(model, rows), torch.tensor([*PADDED_PROMPTS.values()]).bool()
    alone = []
    for r in range(rows):
        real = torch.cat([ids[r, :prompt][valid[r]], ids[r, prompt:]])[None]
        alone.append(say(model, real, memory=_rows(memory, [r]))[0, prompt - TOKENS :])
    pos = Span.of(ids[:, :prompt], valid=valid).pos
    assert pos is not None
    for prefill, decode in (([6], [1, 2, 1]), ([2, 4], [4])):
        state, begin, said = model.init_state(rows, TOKENS), 0, []
        for size in prefill:
            piece = slice(begin, begin + size)
            say(model, ids[:, piece], Span(begin, size, pos[:, piece]), state, memory if begin == 0 else None)
            begin += size
        for size in decode:
            said.append(say(model, ids[:, begin : begin + size], state=state))
            begin += size
        for side, got, expected in zip(PADDED_PROMPTS, torch.cat(said, 1), alone, strict=True):
            close(got, expected, f"after a prompt padded {side}, prefill {prefill}, decode {decode}")


@torch.no_grad()
def state_select(model: AnyModel) -> None:
    """Rows picked from a state (some twice, some not, in another order) go on as those rows."""
    ids, memory = draw(model, 3), memory_of(model, 3)
    for rows in ([2, 0, 0, 1], [1]):
        picked = ids[rows]
        picked[:, 6:] = draw(model, len(rows), 4, seed=4)
        whole = say(model, picked, memory=_rows(memory, rows))
        state = model.init_state(3, TOKENS)
        say(model, ids[:, :6], state=state, memory=memory)
        state.select(torch.tensor(rows))
        feed(model, picked[:, 6:], state, [1, 3], None, whole[:, 6:], f"after select({rows})")


@torch.no_grad()
def state_clone(model: AnyModel) -> None:
    """A clone and its original go on without knowing of each other."""
    ids, memory = draw(model), memory_of(model)
    other = torch.cat([ids[:, :5], draw(model, tokens=5, seed=4)], 1)
    whole, whole_other = say(model, ids, memory=memory), say(model, other, memory=memory)
    state = model.init_state(ROWS, TOKENS)
    say(model, ids[:, :5], state=state, memory=memory)
    twin = state.clone()
    assert twin.nbytes == state.nbytes, "a clone holds another number of bytes"
    for a, b in ((5, 6), (6, 9), (9, 10)):  # in turns: whatever they share, one of them finds overwritten
        feed(model, other[:, a:b], twin, [b - a], None, whole_other[:, a:b], "the clone")
        assert (state.length, twin.length) == (a, b), "the clone moved the clock of its original"
        feed(model, ids[:, a:b], state, [b - a], None, whole[:, a:b], "the original beside its clone")


@torch.no_grad()
def state_rewind(model: AnyModel) -> None:
    """Rewound, a state goes on another way as if it had never gone the first; or it refuses and stays as it was.

    Only a state that keeps every token (`KV` itself) has no excuse.
    """
    ids, memory = draw(model), memory_of(model)
    for back_to in (6, 1):
        state = model.init_state(ROWS, TOKENS)
        say(model, ids[:, :4], state=state, memory=memory)
        for i in range(4, 8):
            say(model, ids[:, i : i + 1], state=state)
        try:
            state.rewind(back_to)
        except StateError as refused:
            keeps_all = all(type(layer.mixer) is KV for layer in state.layers)
            assert not keeps_all, f"rewind({back_to}) of a state that keeps every token: {refused}"
            whole = say(model, ids, memory=memory)
            feed(model, ids[:, 8:], state, [1, 1], None, whole[:, 8:], f"after a refused rewind({back_to})")
            continue
        assert state.length == back_to, f"rewind({back_to}): the clock says {state.length}"
        other = torch.cat([ids[:, :back_to], draw(model, tokens=TOKENS - back_to, seed=4)], 1)
        whole = say(model, other, memory=memory)
        rest = [1, 1, TOKENS - back_to - 2]
        feed(model, other[:, back_to:], state, rest, memory, whole[:, back_to:], f"after rewind({back_to})")


# ---- padding, batches, documents ------------------------------------------------------------------------------------

PADDINGS = {
    "left": [0, 0, 1, 1, 1, 1, 1],
    "left, one token": [0, 0, 0, 0, 0, 0, 1],
    "right": [1, 1, 1, 1, 1, 0, 0],
    "middle": [1, 1, 1, 0, 0, 1, 1],
    "alternating": [1, 0, 1, 0, 1, 0, 1],
    "everywhere": [0, 1, 1, 0, 1, 0, 0],
    "nowhere": [1, 1, 1, 1, 1, 1, 1],
}


def padded(model: AnyModel) -> tuple[Tensor, Tensor]:
    """Ids and where they are real, (7, 7): one row a kind of padding."""
    valid = torch.tensor([*PADDINGS.values()]).bool()
    return draw(model, *valid.shape), valid


def padding_changes_nothing(model: AnyModel) -> None:
    """Padding left, right or in the middle, whatever ids it holds, changes no real token and gets no gradient."""
    ids, valid = padded(model)
    at, memory = Span.of(ids, valid=valid), memory_of(model, len(ids))
    with torch.no_grad():
        out = say(model, ids, at, memory=memory)
        for r, side in enumerate(PADDINGS):
            alone = say(model, ids[r][valid[r]][None], memory=_rows(memory, [r]))
            close(out[r][valid[r]], alone[0], f"padding {side}")
        other_ids = torch.where(valid, ids, (ids + 1) % side_of(model).spec.vocab)
        close(say(model, other_ids, at, memory=memory)[valid], out[valid], "other ids at the padding")
    x = vectors(model, ids, at).requires_grad_()
    (grad,) = torch.autograd.grad(_mixed(say_vectors(model, x, memory, at)[valid]), x)
    assert bool(grad.isfinite().all()), "the gradient is not finite"
    assert grad[~valid].abs().sum() == 0.0, "real tokens depend on padding"


@torch.no_grad()
def encoder_takes_valid(model: EncoderModel) -> None:
    """`valid` says the same as a span made by hand, and says where the memory's tokens are."""
    ids, valid = padded(model)
    at = model.embed.place(Span.of(ids, valid=valid))
    by_hand = model.stack(model.embed(ids, at), at)
    close(model(ids, valid)[valid], by_hand[valid], "forward(ids, valid)")
    memory = model.encode(ids, valid)
    close(memory.value[valid], by_hand[valid], "encode(ids, valid)")
    real = memory.at.real()
    assert real is not None and torch.equal(real, valid), "the memory does not know its padding"


@torch.no_grad()
def source_padding_changes_nothing(model: EncoderDecoderModel) -> None:
    """Padding of the source, on any side, changes no target token."""
    src, valid = padded(model)
    tgt = draw(model, len(src), seed=3)
    out = model(src, tgt, valid)
    for r, side in enumerate(PADDINGS):
        close(out[r], model(src[r][valid[r]][None], tgt[r : r + 1])[0], f"source padded {side}")


def nothing_but_padding(model: AnyModel) -> None:
    """A row of padding only: finite outputs and gradients, other rows untouched; a source of padding only: not read."""
    ids, memory = draw(model), memory_of(model)
    if isinstance(model, EncoderDecoderModel):
        real = torch.tensor([[True], [False]]).expand(-1, SOURCE)
        src, other = draw(model, tokens=SOURCE), draw(model, tokens=SOURCE, seed=4)
        memory, changed = model.encode(src, real), model.encode(torch.where(real, src, other), real)
        close(model.decode(ids, changed), model.decode(ids, memory), "another source, all of it padding")
    valid = torch.tensor([[True], [False]]).expand(-1, TOKENS)
    at = Span.of(ids, valid=valid)
    x = vectors(model, ids, at).requires_grad_()
    out = say_vectors(model, x, memory, at)
    close(out[:1], say(model, ids[:1], memory=_rows(memory, [0])), "the row beside it")
    assert bool(out.isfinite().all()), "outputs at padding are not finite"
    learned = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(_mixed(out), [x, *learned], allow_unused=True)
    assert all(bool(g.isfinite().all()) for g in grads if g is not None), "a gradient is not finite"


@torch.no_grad()
def batch_equals_single(model: AnyModel) -> None:
    """A row says the same in a batch and alone."""
    ids, memory = draw(model, 4), memory_of(model, 4)
    together = say(model, ids, memory=memory)
    for r in range(4):
        close(together[r], say(model, ids[r : r + 1], memory=_rows(memory, [r]))[0], f"row {r} alone")


DOCUMENTS = [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [3, 3, 1, 1, 1, 1, 1, 2, 2, 2]]


@torch.no_grad()
def packed_documents_are_apart(model: AnyModel) -> None:
    """Documents packed into one row say what each says alone (pairs of documents, in an encoder-decoder)."""
    ids, doc = draw(model), torch.tensor(DOCUMENTS)
    src, src_doc = draw(model, tokens=8, seed=3), torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [2, 2, 3, 3, 3, 1, 1, 1]])
    memory = None
    if isinstance(model, EncoderDecoderModel):
        src_at = model.encoder.embed.place(Span.of(src, doc=src_doc))
        memory = Memory(model.encoder.stack(model.encoder.embed(src, src_at), src_at), src_at)
    packed = say(model, ids, Span.of(ids, doc=doc), memory=memory)
    for r, row in enumerate(DOCUMENTS):
        for d in sorted(set(row)):
            mine = doc[r] == d
            if isinstance(model, EncoderDecoderModel):
                memory = model.encode(src[r][src_doc[r] == d][None])
            alone = say(model, ids[r][mine][None], memory=memory)
            close(packed[r][mine], alone[0], f"document {d} of row {r}")


def _rows(memory: Memory | None, rows: list[int]) -> Memory | None:
    return None if memory is None else memory.select(torch.tensor(rows))


# ---- modes, kernels, types ------------------------------------------------------------------------------------------


@torch.no_grad()
def eval_is_deterministic(model: AnyModel) -> None:
    """In eval mode the same call gives the same bits, and leaves parameters and buffers alone."""
    ids, memory = draw(model), memory_of(model)
    before = {name: x.clone() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    first, second = say(model, ids, memory=memory), say(model, ids, memory=memory)
    assert torch.equal(first, second), f"two calls differ by {(first - second).abs().max().item():.3g}"
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(x, before[name]), f"a call changed {name}"


@torch.no_grad()
def train_without_dropout_equals_eval(model: AnyModel) -> None:
    """Where nothing is drawn (dropout, random places) or balanced on the way, training mode computes what eval does."""
    assert all(m.p == 0.0 for m in model.modules() if isinstance(m, nn.Dropout)), (
        "the model of this check drops nothing"
    )
    ids = draw(model)
    expected = say(model, ids, memory=memory_of(model))
    trained = _copy(model).train()  # a copy: training may move statistics
    for m in trained.modules():
        if isinstance(m, RandomPlaces) or (isinstance(m, TopKRouter) and m.rule.bias_rate > 0):
            m.eval()
    close(say(trained, ids, memory=memory_of(trained)), expected, "training mode")


def _copy(model: AnyModel) -> AnyModel:
    return copy.deepcopy(model, {id(m.spec): m.spec for m in model.modules() if isinstance(m, EVERY)})


@contextmanager
def training(model: AnyModel) -> Iterator[None]:
    """The model in training mode, and back."""
    model.train()
    try:
        yield
    finally:
        model.eval()


def kernels_agree(model: AnyModel, other: str = "") -> None:
    """The formula written out and torch's kernel say the same: full, padded and cached.

    Each layer is asked by the backend that it does not take by itself; other: by this one, where it can do the case.
    """
    attends = [m for m in model.modules() if isinstance(m, Attend)]
    own = [a.backend for a in attends]
    cannot = {a for m in model.modules() if isinstance(m, AttentionMixer) and m.sinks is not None for a in m.children()}
    ids = draw(model)
    valid = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    valid[1, :3] = False
    with torch.no_grad():
        expected = _three_ways(model, ids, valid, other != "flex")
        try:
            for a in attends:
                if other == "flex":
                    a.backend = "flex" if a not in cannot else "reference"
                else:
                    a.backend = "sdpa" if a.backend == "reference" and a.softcap is None else "reference"
            ways = ("full", "padded", "cached")
            for got, out, what in zip(_three_ways(model, ids, valid, other != "flex"), expected, ways, strict=False):
                close(got, out, f"{sorted({a.backend for a in attends})} against {sorted(set(own))}, {what}")
        finally:
            for a, name in zip(attends, own, strict=True):
                a.backend = name


def flex_agrees(model: AnyModel) -> None:
    """The same with FlexAttention, full and padded; it is slow on a CPU, so it is not in CHECKS."""
    kernels_agree(model, "flex")


def _three_ways(model: AnyModel, ids: Tensor, valid: Tensor, cached: bool) -> list[Tensor]:
    memory = memory_of(model)
    padded = say(model, ids, Span.of(ids, valid=valid), memory=memory)[valid]
    out = [say(model, ids, memory=memory), padded]
    if not isinstance(model, EncoderModel) and cached:
        state = model.init_state(ROWS, TOKENS)
        out.append(torch.cat([say(model, ids[:, a:b], None, state, memory) for a, b in ((0, 7), (7, 8), (8, 10))], 1))
    return out


@torch.no_grad()
def close_in_lower_precision(model: AnyModel) -> None:
    """float32 and bfloat16 stay near float64, relative to the size of the logits; nothing turns into another type."""
    ids = draw(model)
    expected = say(model, ids, memory=memory_of(model))
    routed = any(isinstance(m, TopKRouter) for m in model.modules())  # a close call between experts may go either way
    # the delta rule norms what a head has read, which is near zero where query and key happen to be at right angles:
    # with heads of a few channels that happens, and what is normed up is rounding
    normed = any(isinstance(m, GatedDeltaMixer) for m in model.modules())
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 1.0 if routed else 0.5 if normed else 0.25)):
        low = _copy(model).to(dtype)
        got = say(low, ids, memory=memory_of(low))
        assert got.dtype is dtype, f"a model in {dtype} answers in {got.dtype}"
        off = ((got.double() - expected).norm() / expected.norm()).item()
        assert off <= tolerance, f"{dtype}: off by {off:.3g} of the size of the output"


# ---- parameters, specs, files ---------------------------------------------------------------------------------------


def every_parameter_learns(model: AnyModel) -> None:
    """Every parameter, and every projection inside a fused one, gets a finite gradient that is not zero."""
    params = list(model.named_parameters())
    ids = draw(model, 8)
    with _chosen_experts(model) as chosen:
        match model:
            case EncoderDecoderModel():
                out = model(draw(model, 8, SOURCE, seed=3), ids)
            case _:
                out = say(model, ids)
    grads = torch.autograd.grad(_mixed(out), [p for _, p in params], allow_unused=True)
    got = dict(zip((name for name, _ in params), grads, strict=True))
    idle = tuple(f"{moe}.experts.{e}." for moe, load in chosen.items() for e, n in enumerate(load) if n == 0)
    for name, grad in got.items():
        if name.startswith(idle):
            continue  # no token chose this expert
        assert grad is not None, f"{name} gets no gradient"
        assert bool(grad.isfinite().all()), f"the gradient of {name} is not finite"
        if name.endswith("stack.layers.0.mixer.residue") and side_of(model).spec.layers[0].place in ("branch", "peri"):
            continue  # it mixes its own values with themselves: a scale, which the norm behind takes out again
        assert bool(grad.any()), f"the gradient of {name} is zero"
    for name, m in model.named_modules():
        if isinstance(m, FusedLinear) and not name.startswith(idle):
            for i, part in enumerate(got[f"{name}.weight"].split(m.parts)):
                assert bool(part.any()), f"the gradient of {name}, projection {i}, is zero"


@contextmanager
def _chosen_experts(model: AnyModel) -> Iterator[dict[str, list[int]]]:
    """How many tokens chose each expert of each mixture while this is open."""
    load: dict[str, list[int]] = {}

    def note(name: str, routing: Routing) -> None:
        load[name] = [
            a + b for a, b in zip(load.get(name, [0] * len(routing.load)), routing.load.tolist(), strict=True)
        ]

    hooks = [
        m.register_forward_hook(lambda router, args, out, name=name: note(name.removesuffix(".router"), out))
        for name, m in model.named_modules()
        if isinstance(m, TopKRouter)
    ]
    try:
        yield load
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def spec_survives_text(model: AnyModel) -> None:
    """JSON gives back the same spec, which builds the same parameters, to the bit, from the same seed."""
    spec = model.spec
    read = type(spec).from_json(spec.to_json())
    assert read == spec and hash(read) == hash(spec), f"read back as another spec:\n{read!r}\nfrom\n{spec!r}"
    assert read.to_json() == spec.to_json(), "the text changes when it is read and written again"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        one = spec.build()
        torch.manual_seed(3)
        two = read.build()
    for (name, a), (name_two, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert name == name_two and torch.equal(a, b), f"{name}: built from the same text with other values"
    assert [n for n, _ in one.named_parameters()] == [n for n, _ in model.named_parameters()], "other parameters"


@torch.no_grad()
def weights_survive_a_file(model: AnyModel) -> None:
    """Saved to safetensors and loaded into a new model: the same outputs; what was tied is tied."""
    ids = draw(model)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "weights.safetensors")
        save_model(model, path)
        again = type(model.spec).from_json(model.spec.to_json()).build().double().eval()
        missing, unexpected = load_model(again, path, strict=True)
    assert not missing and not unexpected, f"missing {missing}, unexpected {unexpected}"
    close(say(again, ids, memory=memory_of(again)), say(model, ids, memory=memory_of(model)), "the loaded model", 0.0)
    side = side_of(again)
    if side.head is not None:
        tied = side.head.project.weight is side.embed.tokens.weight
        assert tied == side.spec.head.tied, f"head.tied is {side.spec.head.tied}, the weights say {tied}"
    if isinstance(again, EncoderDecoderModel):
        shared = again.encoder.embed.tokens is again.decoder.embed.tokens
        assert shared == again.spec.shared, f"shared is {again.spec.shared}, the tables say {shared}"


def starts_near_chance(model: AnyModel) -> None:
    """Fresh from its spec, the model's first loss on random targets is within 5 % of ln V."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        fresh = model.spec.build().eval()
        ids, targets = draw(model, 8, 32), draw(model, 8, 32, seed=7)
        out = say(fresh, ids, memory=memory_of(fresh, 8))
    if side_of(model).head is None:
        return
    loss = F.cross_entropy(out.flatten(0, 1), targets.flatten()).item()
    chance = math.log(side_of(model).spec.vocab)
    assert abs(loss / chance - 1.0) <= 0.05, f"first loss {loss:.4f}, ln V is {chance:.4f}"


# ---- the table ------------------------------------------------------------------------------------------------------

DECODERS = (DecoderModel, EncoderDecoderModel)
EVERY = (DecoderModel, EncoderModel, EncoderDecoderModel)


@dataclass(frozen=True)
class Check:
    """A property and the families that owe it."""

    run: Callable[..., None]
    families: tuple[type[nn.Module], ...] = EVERY

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.run.__name__


CHECKS: dict[str, Check] = {
    c.name: c
    for c in (
        Check(causal_by_gradient, DECODERS),
        Check(causal_by_perturbation, DECODERS),
        Check(reads_exactly_its_window),
        Check(blind_beyond_its_window),
        Check(reads_every_source_token, (EncoderDecoderModel,)),
        Check(order_matters, (EncoderModel,)),
        Check(relative_positions_are_relative),
        Check(cached_equals_full, DECODERS),
        Check(padded_prompt_then_decode, DECODERS),
        Check(state_select, DECODERS),
        Check(state_clone, DECODERS),
        Check(state_rewind, DECODERS),
        Check(padding_changes_nothing),
        Check(encoder_takes_valid, (EncoderModel,)),
        Check(source_padding_changes_nothing, (EncoderDecoderModel,)),
        Check(nothing_but_padding),
        Check(batch_equals_single),
        Check(packed_documents_are_apart),
        Check(eval_is_deterministic),
        Check(train_without_dropout_equals_eval),
        Check(kernels_agree),
        Check(close_in_lower_precision),
        Check(every_parameter_learns),
        Check(spec_survives_text),
        Check(weights_survive_a_file),
        Check(starts_near_chance),
    )
}


def owed(model: AnyModel) -> list[Check]:
    """The checks a model of this family owes."""
    return [check for check in CHECKS.values() if isinstance(model, check.families)]


def failures(model: AnyModel) -> list[str]:
    """Run every check the model owes; one line for each that fails, whatever it raised."""
    found = []
    for check in owed(model):
        try:
            check.run(model)
        except Exception as e:  # a crash is a failure of that check, and must not hide the others
            found.append(f"{check.name}: {'' if isinstance(e, AssertionError) else type(e).__name__ + ': '}{e}")
    return found
